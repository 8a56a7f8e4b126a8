"""Finds or compiles a program, links it and loads it over maps that exist already."""

from __future__ import annotations

import errno
import logging
import os
import struct
from collections.abc import Mapping

from tailbound.errors import CapabilityError, ConfigError
from tailbound.kernel import built, objects, syscalls
from tailbound.kernel.compile import COMPILERS, candidates, compile_program
from tailbound.kernel.maps import EVENTS, PROGRAMS
from tailbound.wire.schema import FANOUT_MAPS, WORKER_MAPS

log = logging.getLogger("tailbound")
WORKER = "tb_worker"
#: Of jobs with a key.
TAGGED = "tb_tagged"
FANOUT = "tb_fanout"
#: Maps that each program may use, in the order of their numbers.
WORKER_MAP_NAMES = (*(m.name for m in WORKER_MAPS), EVENTS, PROGRAMS)
FANOUT_MAP_NAMES = tuple(m.name for m in FANOUT_MAPS)
#: Where programs come from: ``object`` is one that was built ahead (``kernel.built``).
LOADERS = ("object", *COMPILERS)
#: Program and attach types by what clang's objects call them.
_KINDS = {
    "xdp": (syscalls.PROG_TYPE_XDP, syscalls.ATTACH_XDP),
    "xdp/devmap": (syscalls.PROG_TYPE_XDP, syscalls.ATTACH_XDP_DEVMAP),
    "tc": (syscalls.PROG_TYPE_TC, 0),
}


def load(
    source: str,
    function: str,
    defines: Mapping[str, int],
    maps: tuple[str, ...],
    fds: Mapping[str, int],
    loader: str,
    kind: str = "xdp",
) -> int:
    """Loads ``function`` of ``xdp_programs/source``, of ``kind`` xdp, xdp/devmap or tc, and returns its descriptor.

    With loader ``auto`` an object that was built ahead comes first, then what compilers there are. One that fails, or
    whose program is refused, is followed by the next.

    Raises:
        CapabilityError: no object and no compiler, or the kernel refused; the message ends with the verifier's last
            lines.
        ConfigError: no such loader.
    """
    if loader not in ("auto", *LOADERS):
        raise ConfigError(f"loader {loader!r}: choose auto, {', '.join(LOADERS[:-1])} or {LOADERS[-1]}")
    ahead = None if loader in COMPILERS else built.find(source, kind, defines, maps)
    if loader == "object" and ahead is None:
        raise built.missing(source, defines)
    sources = [loader] if ahead is None else ["object"]
    if loader == "auto":
        try:
            sources = sources[: ahead is not None] + candidates()
        except CapabilityError:
            if ahead is None:
                raise
    while True:
        by = sources.pop(0)
        try:
            code = ahead or compile_program(source, function, defines, maps, by, kind)
            return _into_kernel(objects.link(code, maps, fds, defines), function, kind)
        except CapabilityError as error:
            if not sources or isinstance(error, _Powerless):
                raise
            ahead, why = None, str(error).splitlines()[0]
            log.warning("%s by %s cannot be had, trying %s: %s", function, by, sources[0], why)


class _Powerless(CapabilityError):
    """No other compiler would help."""


def _into_kernel(code: bytes, function: str, kind: str) -> int:
    try:
        type_, where = _KINDS[kind]
        return syscalls.prog_load(code, name=function, kind=type_, where=where)
    except syscalls.VerifierError as error:
        if error.errno == errno.EPERM and not error.log:
            raise _Powerless(
                "loading a program needs CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN: run as root, or let root run "
                "`tailbound attach`"
            ) from error
        if "pointer prohibited" in error.log:
            raise _Powerless(
                "the verifier needs CAP_PERFMON for the program's pointer arithmetic, beside CAP_BPF and "
                "CAP_NET_ADMIN: add it, run as root, or let root run `tailbound attach`"
            ) from error
        tail = "\n".join(error.log.splitlines()[-40:])
        raise CapabilityError(
            f"the kernel refused {function} (errno {error.errno}, {error.strerror}): use a newer kernel or the udp "
            f"datapath; the verifier said:\n{tail}"
        ) from error


def load_worker(fds: Mapping[str, int], defines: Mapping[str, int], loader: str = "auto") -> int:
    """Loads the worker's program; ``defines`` as ``receiver_defines`` makes them.

    Raises:
        CapabilityError: see ``load``.
    """
    return load("worker.bpf.c", WORKER, defines, WORKER_MAP_NAMES, fds, loader)


def load_tagged(fds: Mapping[str, int], defines: Mapping[str, int], loader: str = "auto") -> None:
    """Loads the program for packets with tags, to which the worker's hands over what a job with a key receives.

    ``defines`` are the worker's. It goes with the last descriptor and pin of the array of programs.

    Raises:
        CapabilityError: see ``load``.
    """
    program = load("tagged.bpf.c", TAGGED, defines, WORKER_MAP_NAMES, fds, loader)
    try:
        syscalls.map_update(fds[PROGRAMS], struct.pack("=I", 0), struct.pack("=I", program))
    finally:
        os.close(program)


def receiver_defines(port: int, width: int, result_rows: int, vlan: int = 0, *, ipv6: bool = False) -> dict[str, int]:
    """Macros of the programs that receive, for a UDP port, payload width (codes), result ring (rows), and VLAN or 0.

    Each program is for one family of IP, so that IPv4 pays nothing for IPv6.
    """
    defines = {"TB_PORT": port, "TB_WIDTH": width, "TB_RESULT_ROWS": result_rows, "TB_VLAN": vlan}
    return defines | of_family(ipv6=ipv6)


def of_family(*, ipv6: bool) -> dict[str, int]:
    """Macros that choose the family of IP."""
    return {"TB_IPV6": 1} if ipv6 else {}
