"""Programs that `make wheel` built ahead and that came with the package: a node needs no compiler for them.

An object is for one payload width; ports, rings and maps are put in when it is loaded (``kernel.objects``). It names
the sources that it is of, and is taken only beside these: a checkout whose sources have changed compiles them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from tailbound.errors import CapabilityError
from tailbound.kernel import compile as compiling
from tailbound.kernel import objects

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
SECTION = "tailbound"


def name_of(source: str, defines: Mapping[str, int]) -> str:
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
    data = (FOLDER / name_of(source, defines)).read_bytes()
    if objects.section_text(data, SECTION) != compiling.signature():
        raise ValueError(f"the object of {source} is of other sources: build it again")
    return data


def missing(source: str, defines: Mapping[str, int]) -> CapabilityError:
    """Says that there is no such object, and what helps."""
    here = ", ".join(map(str, widths(ipv6="TB_IPV6" in defines)))
    rows = f" for rows of {defines['TB_WIDTH']} codes" if "TB_WIDTH" in defines else ""
    smaller = f"give an --mtu for rows of {here} codes, which did, " if rows and here else ""
    return CapabilityError(
        f"{source}{rows} did not come with this installation as an object: {smaller}install a wheel of `make wheel`, "
        "or let a compiler build it (--loader auto)"
    )
