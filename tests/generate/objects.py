"""Builds what a wheel has beside its Python: the kernel's programs, with clang, and the C library.

python -m generate.objects [FOLDER]      # part of `make wheel`; without FOLDER into the package
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tailbound.errors import CapabilityError
from tailbound.kernel import built, core
from tailbound.kernel import compile as compiling

#: Rows of a switch lie in a page.
SWITCH_MOST = 3392


def every() -> Iterator[tuple[str, dict[str, int]]]:
    """Source and macros of every object."""
    families: tuple[tuple[Iterable[int], dict[str, int]], ...] = (built.WIDTHS, {}), (built.WIDTHS_IPV6, {"TB_IPV6": 1})
    for there, family in families:
        for width in there:
            for program in ("worker", "tagged", "switch", "switch_out")[: 4 if width <= SWITCH_MOST else 2]:
                yield f"{program}.bpf.c", {"TB_WIDTH": width} | family
        yield "fanout.bpf.c", family
    yield "faults.bpf.c", {}


def build(folder: Path) -> list[Path]:
    """Builds all objects into ``folder``, which is made; others that lie there are removed.

    Raises:
        CapabilityError: clang is missing or fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.bpf.o"):
        old.unlink()
    signature = f'-DTB_SIGNATURE="{compiling.signature()}"'

    def one(source: str, defines: Mapping[str, int]) -> Path:
        path = folder / built.name_of(source, defines)
        path.write_bytes(compiling.compile_object(source, [*compiling.object_flags(defines), signature]))
        return path

    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        return list(compilers.map(lambda each: one(*each), every()))


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else built.FOLDER
    try:
        made = build(folder)
        library = folder / core.name()
        library.write_bytes(core.compiled())
    except CapabilityError as error:
        print(f"tailbound: {error}", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in (*made, library)) / 1024
    print(f"{len(made)} objects and {library.name} in {folder}, {size:.0f} KiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
