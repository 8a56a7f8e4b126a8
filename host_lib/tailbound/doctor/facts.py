"""Raw facts about this machine, read from /proc, /sys and the file system; nothing is judged and nothing is changed."""

from __future__ import annotations

import errno
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from tailbound.errors import CapabilityError
from tailbound.kernel import built, core, headers, syscalls
from tailbound.kernel.compile import LIBBPF, bcc_path, clang_path
from tailbound.kernel.maps import possible_cpus

#: Bits of the capabilities that matter here (linux/capability.h).
CAPABILITY_BITS = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21, "CAP_SYS_RESOURCE": 24, "CAP_PERFMON": 38, "CAP_BPF": 39}


@dataclass(frozen=True)
class Machine:
    """What the kernel and the file system say."""

    kernel: str  #: release, as in ``uname -r``
    architecture: str
    btf: bool  #: /sys/kernel/btf/vmlinux exists
    bpf_error: str | None  #: why this process may not use bpf(2); None where it may
    bcc: str | None  #: path of Debian's module
    headers: str | None  #: path of the kernel headers BCC can use
    clang: str | None  #: path of a clang that can build the same sources.
    libbpf: bool  #: bpf/bpf_helpers.h is installed
    effective_uid: int
    capabilities: dict[str, bool]  #: effective, by name
    cpus: int  #: CPUs this machine could have (per-CPU maps count them)
    rmem_max: int | None = None  #: net.core.rmem_max, bytes; None where it cannot be read
    objects: tuple[int, ...] = ()  #: payload widths (codes) whose program came with the package, built ahead
    objects_ipv6: tuple[int, ...] = ()  #: the same for IPv6
    core: str | None = None  #: of udp's C library: its file, or a compiler.


def machine() -> Machine:
    """Reads all facts; takes a few milliseconds."""
    bcc = bcc_path()
    return Machine(
        kernel=platform.release(),
        architecture=platform.machine(),
        btf=Path("/sys/kernel/btf/vmlinux").exists(),
        bpf_error=bpf_error(),
        bcc=str(bcc) if bcc else None,
        headers=headers.source_tree(),
        clang=clang_path(),
        libbpf=LIBBPF.exists(),
        effective_uid=os.geteuid(),
        capabilities={name: has_capability(name) for name in CAPABILITY_BITS},
        cpus=possible_cpus(),
        rmem_max=int(_read(Path("/proc/sys/net/core/rmem_max")) or 0) or None,
        objects=built.widths(),
        objects_ipv6=built.widths(ipv6=True),
        core=core.origin(),
    )


def has_capability(*names: str) -> bool:
    """Whether all of ``names`` are in this process's effective set."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", _read(Path("/proc/self/status")) or "", re.MULTILINE)
    effective = int(found[1], 16) if found else 0
    return all(effective >> CAPABILITY_BITS[name] & 1 for name in names)


def bpf_error() -> str | None:
    """Why bpf(2) refuses to make a small map for this process (closed again at once), or None where it does not."""
    try:
        os.close(syscalls.map_create(syscalls.MAP_TYPE_ARRAY, 4, 8, 1))
    except CapabilityError as error:
        return str(error)
    except OSError as error:
        return f"{errno.errorcode.get(error.errno or 0, error.errno)}: {error.strerror}"
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
