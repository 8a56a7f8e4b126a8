"""Programs that were built ahead and came with the package: a node needs no compiler and no headers for them.

    python -m tailbound.kernel.built [FOLDER]      # builds all of them, with clang: part of `make wheel`

An object is for one payload width; ports, rings and maps are put in when it is loaded (``kernel.objects``). It names
the sources that it is of, and is taken only beside these: a checkout whose sources have changed compiles them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tailbound.errors import CapabilityError
from tailbound.kernel import compile as compiling
from tailbound.kernel import objects
from tailbound.wire.schema import MAX_RANKS

#: Where a wheel has them.
FOLDER = Path(__file__).resolve().parent.parent / "_objects"
#: Payload widths (codes), and the MTU that each is for.
WIDTHS = {
    1152: 1280,  # the least of IPv6
    1280: 1400,  # WireGuard (1420), several tunnels
    1344: 1450,  # VXLAN, or a cloud with 1460
    1408: 1500,
    2944: 3072,  # Intel's drivers, whose frames lie in 3 KiB
    3392: 3498,  # a page: ena, veth, mlx5 and others at MTU 9000, too
    8896: 9000,
}
#: The same for IPv6, whose header is 20 bytes longer.
WIDTHS_IPV6 = {1152: 1280, 1280: 1400, 1344: 1500, 2944: 3072, 3328: 3498, 3392: 3506, 8832: 9000}
#: Copies that a program of fan-out can make. The verifier walks through all of them, which takes 150 ms for 256.
FANOUT_COPIES = (16, MAX_RANKS)
#: Rows of a switch lie in a page.
_SWITCH_MOST = 3392
_SECTION = "tailbound"


def _all() -> Iterator[tuple[str, dict[str, int]]]:
    """Source and macros of every object."""
    families: tuple[tuple[Iterable[int], dict[str, int]], ...] = (WIDTHS, {}), (WIDTHS_IPV6, {"TB_IPV6": 1})
    for there, family in families:
        for width in there:
            for program in ("worker", "tagged", "switch", "switch_out")[: 4 if width <= _SWITCH_MOST else 2]:
                yield f"{program}.bpf.c", {"TB_WIDTH": width} | family
        for copies in FANOUT_COPIES:
            yield "fanout.bpf.c", {"TB_MOST_COPIES": copies} | family
    yield "faults.bpf.c", {}


def _name(source: str, defines: Mapping[str, int]) -> str:
    """The file of an object."""
    given = compiling.fixed(defines)
    family = ["ipv6"] if given.pop("TB_IPV6", 0) else []
    return "-".join([source.removesuffix(".bpf.c"), *family, *(str(given[name]) for name in sorted(given))]) + ".bpf.o"


def find(source: str, section: str, defines: Mapping[str, int], maps: Sequence[str]) -> bytes | None:
    """Instructions of an object of these sources, as ``compile.compile_program`` gives them; None: there is none.

    Args:
        source: its file in ``xdp_programs``.
        section: of the object, ``xdp``, ``xdp/devmap`` or ``tc``.
        defines: macros; of those that are put in at loading the value does not matter.
        maps: names of the maps that the program may use, in the order of their numbers.
    """
    try:
        return objects.read_elf(_object(source, defines), section, maps)
    except (OSError, ValueError):
        return None


def widths(*, ipv6: bool = False) -> tuple[int, ...]:
    """Payload widths, in codes, for which a worker's program of a family of IP is here."""
    found = []
    for width in WIDTHS_IPV6 if ipv6 else WIDTHS:
        with contextlib.suppress(OSError, ValueError):
            _object("worker.bpf.c", {"TB_WIDTH": width} | ({"TB_IPV6": 1} if ipv6 else {}))
            found.append(width)
    return tuple(found)


def _object(source: str, defines: Mapping[str, int]) -> bytes:
    """The file of an object.

    Raises:
        OSError, ValueError: there is none, or it is of other sources than those here.
    """
    data = (FOLDER / _name(source, defines)).read_bytes()
    if objects.section_text(data, _SECTION) != compiling.signature():
        raise ValueError(f"the object of {source} is of other sources: build it again")
    return data


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
        path = folder / _name(source, defines)
        path.write_bytes(compiling.compile_object(source, [*compiling.object_flags(defines), signature]))
        return path

    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        return list(compilers.map(lambda each: one(*each), _all()))


def missing(source: str, defines: Mapping[str, int]) -> CapabilityError:
    """Says that there is no such object, and what helps."""
    ipv6 = "TB_IPV6" in defines
    here = ", ".join(map(str, widths(ipv6=ipv6)))
    if "TB_WIDTH" in defines and here:
        return CapabilityError(
            f"{source} for rows of {defines['TB_WIDTH']} codes did not come with this installation, those of {here} "
            f"did: give a smaller --mtu (rows of {1344 if ipv6 else 1408} codes fit MTU 1500), or let a compiler build "
            "it (--loader auto)"
        )
    return CapabilityError(
        f"{source} did not come with this installation as an object: install a wheel of `make wheel`, or let a "
        "compiler build it (--loader auto)"
    )


def main() -> int:
    """Entry point: builds into the folder that is named, or into the package."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    try:
        made = build(folder)
    except CapabilityError as error:
        print(f"tailbound: {error}", file=sys.stderr)
        return 1
    print(f"{len(made)} objects in {folder}, {sum(p.stat().st_size for p in made) / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
