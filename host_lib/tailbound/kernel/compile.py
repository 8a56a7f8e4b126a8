"""From C to instructions, by BCC or by clang; both compile the same sources and give the same form.

See ``kernel.objects`` for that form. Results are cached, so that only the first worker on a machine pays.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tailbound.errors import CapabilityError
from tailbound.kernel import cache, headers, objects
from tailbound.kernel.cache import assets

COMPILERS = ("bcc", "clang")
#: What clang 13 makes of bounds the verifier does not follow; up to the other one the programs have been tried.
LEAST_CLANG, TRIED_CLANG = 14, 19
_BCC = Path("/usr/lib/python3/dist-packages/bcc")
#: Header that clang needs and BCC does not.
LIBBPF = Path("/usr/include/bpf/bpf_helpers.h")
_HELP = "try the other loader, or use the udp datapath (see `tailbound doctor`)"


def bcc_path() -> Path | None:
    """Debian's BCC module. Never the PyPI package of that name, which is something else."""
    return _BCC if (_BCC / "libbcc.py").exists() else None


@functools.cache
def clang_path() -> str | None:
    """The newest clang on the path up to ``TRIED_CLANG``, else the oldest above it; none below ``LEAST_CLANG``."""
    found: dict[int, str] = {}
    for name in ("clang", *(f"clang-{v}" for v in range(LEAST_CLANG, 31))):
        path = shutil.which(name)
        major = _major(path) if path else 0
        if path and major >= LEAST_CLANG:
            found.setdefault(major, path)
    tried = [major for major in found if major <= TRIED_CLANG]
    return found[max(tried) if tried else min(found)] if found else None


def _major(clang: str) -> int:
    try:
        said = cache.run([clang, "--version"], _HELP)
    except CapabilityError:
        return 0
    number = re.search(rb"clang version (\d+)", said)
    return int(number[1]) if number else 0


def candidates() -> list[str]:
    """Who can compile here, in order: BCC with headers, clang with libbpf's.

    Raises:
        CapabilityError: none is complete.
    """
    found = []
    if bcc_path() and headers.source_tree():
        found.append("bcc")
    if clang_path() and LIBBPF.exists():
        found.append("clang")
    if found:
        return found
    if bcc_path():
        raise CapabilityError("no kernel headers for BCC: apt-get install linux-headers-amd64 (any version does)")
    if clang_path():
        raise CapabilityError("no bpf/bpf_helpers.h for clang: apt-get install libbpf-dev")
    raise CapabilityError("neither BCC nor clang: apt-get install python3-bpfcc linux-headers-amd64, or use udp")


def _sources() -> list[Path]:
    return sorted(p for part in ("ebpf", "xdp_programs") for p in assets(part).glob("*.[ch]"))


def signature() -> str:
    """What the sources are, as text: other ones have another."""
    return cache.key(p.read_bytes() for p in _sources())


def fixed(defines: Mapping[str, int]) -> dict[str, int]:
    """Those of ``defines`` that clang has to know; the others are put in at loading (``objects.NUMBERS``)."""
    return {name: value for name, value in defines.items() if name not in objects.NUMBERS}


def object_flags(defines: Mapping[str, int]) -> list[str]:
    """What both compilers are told: where the headers are, and the macros."""
    include = [f"-I{assets(part)}" for part in ("ebpf", "xdp_programs")]
    return ["-fno-strict-aliasing", *include, *(f"-D{name}={value}" for name, value in sorted(defines.items()))]


@functools.cache
def _version(loader: str) -> str:
    """What else a result depends on: the compiler, and for BCC the kernel whose headers it uses."""
    if loader == "clang":
        clang = clang_path()
        return cache.run([clang, "--version"], _HELP).decode() if clang else ""
    path = bcc_path()
    return f"{(path / 'version.py').read_text() if path else ''} {platform.release()} {headers.source_tree()}"


def compile_program(
    source: str, function: str, defines: Mapping[str, int], maps: Sequence[str], loader: str, section: str = "xdp"
) -> bytes:
    """Instructions of ``function`` in ``xdp_programs/source``, with maps as numbers.

    Args:
        defines: macros of the specialisation, all integers.
        maps: names of the maps the program may use, in the order of their numbers.
        loader: ``bcc`` or ``clang``.
        section: what clang's object calls programs of this kind, ``xdp`` or ``tc``.

    Raises:
        CapabilityError: the compiler is missing or failed; the message has its output.
    """
    texts = [p.read_bytes() for p in _sources()]
    flags = object_flags(fixed(defines) if loader == "clang" else defines)
    name = cache.key([loader, _version(loader), source, function, " ".join(flags), " ".join(maps), *texts])
    if loader == "bcc":
        return cache.get(name, lambda: _with_bcc(source, function, flags, maps))

    def compiled() -> bytes:
        try:
            return objects.read_elf(compile_object(source, flags), section, maps)
        except ValueError as error:
            raise CapabilityError(
                f"clang's object of {source} ({function}) cannot be used ({error}): use clang 14 or loader='bcc'"
            ) from error

    return cache.get(name, compiled)


def _with_bcc(source: str, function: str, flags: list[str], maps: Sequence[str]) -> bytes:
    path = bcc_path()
    if path is None:
        raise CapabilityError("BCC is missing: apt-get install python3-bpfcc (not the PyPI package called bcc)")
    environment = os.environ | headers.environment(cache.folder())
    numbers = [f"-DTB_FD_{name}={number}" for name, number in objects.placeholders(maps).items()]
    job = {
        "bcc": str(path),
        "text": (assets("xdp_programs") / source).read_text(),
        "function": function,
        "cflags": ["-DTB_BCC=1", "-Wno-macro-redefined", *flags, *numbers],
    }
    child = Path(__file__).with_name("bcc_child.py")
    return cache.run([sys.executable, "-I", str(child)], f"by BCC; {_HELP}", json.dumps(job).encode(), environment)


def compile_object(source: str, flags: Sequence[str]) -> bytes:
    """The object file of ``xdp_programs/source`` by clang.

    Args:
        flags: of ``object_flags``.

    Raises:
        CapabilityError: clang is missing or failed; the message has its output.
    """
    clang = clang_path()
    if clang is None:
        raise CapabilityError("clang is missing: apt-get install clang-14 libbpf-dev")
    options = ["-O2", "-target", "bpf", "-mcpu=v3", "-Wall", "-Wextra", "-Werror", *flags]
    options += [f"-I/usr/include/{platform.machine()}-linux-gnu", "-c", str(assets("xdp_programs") / source)]
    return cache.compiled(lambda out: [clang, *options, "-o", out], _HELP)
