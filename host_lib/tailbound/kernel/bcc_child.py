"""Compiles one program with BCC in a process of its own: BCC changes folders, keeps 129 MB, and may abort.

Run by path, without the package: reads one JSON object {bcc, text, function, cflags} from standard input and writes
the instructions to standard output; BCC's complaints go to standard error.
"""

from __future__ import annotations

import importlib.util
import json
import sys


def main() -> int:
    """Entry point."""
    job = json.load(sys.stdin)
    spec = importlib.util.spec_from_file_location(
        "bcc", job["bcc"] + "/__init__.py", submodule_search_locations=[job["bcc"]]
    )
    assert spec is not None
    assert spec.loader is not None
    bcc = importlib.util.module_from_spec(spec)
    sys.modules["bcc"] = bcc
    spec.loader.exec_module(bcc)
    code = bcc.BPF(text=job["text"], cflags=job["cflags"]).dump_func(job["function"])
    sys.stdout.buffer.write(code)
    return 0 if code else 1


if __name__ == "__main__":
    raise SystemExit(main())
