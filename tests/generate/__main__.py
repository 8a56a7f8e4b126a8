"""``python -m generate`` writes the generated files; with ``--check`` it names stale ones and fails."""

from __future__ import annotations

import sys
from pathlib import Path

from generate import headers, pages, rules_index


def generated(root: Path) -> dict[Path, str]:
    """Every generated file below the repository's ``root`` with the text it ought to have."""
    return of_schema(root) | {
        root / "docs" / "settings.md": pages.settings_page(),
        root / "docs" / "rules_index.md": rules_index.page(root),
    }


def of_schema(root: Path) -> dict[Path, str]:
    """Those that follow from the schema alone."""
    return {
        root / "ebpf" / "wire.h": headers.wire_header(),
        root / "ebpf" / "abi.h": headers.abi_header(),
        root / "host_lib" / "core" / "records.h": headers.records_header(),
        root / "p4" / "wire.p4": headers.wire_p4(),
        root / "docs" / "wire.md": pages.wire_page(),
    }


def stale(files: dict[Path, str]) -> list[Path]:
    """Those that are missing or have another text."""
    return [path for path, text in files.items() if not path.exists() or path.read_text() != text]


def main() -> int:
    root = Path(__file__).resolve().parents[2]
    files, check = generated(root), "--check" in sys.argv[1:]
    bad = stale(files)
    for path in bad:
        if check:
            print(f"stale: {path.relative_to(root)} (run `make generate`)", file=sys.stderr)
        else:
            path.write_text(files[path])
    return 1 if bad and check else 0


if __name__ == "__main__":
    raise SystemExit(main())
