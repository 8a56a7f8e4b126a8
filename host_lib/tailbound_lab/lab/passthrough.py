"""An XDP program that passes everything, two instructions, loaded without any compiler.

Its presence alone is the point: a veth whose other end carries XDP sends no super-frames, so packets
have wire size from there on. Attached by BPF link, so it goes when its owner dies.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

from tailbound.errors import CapabilityError
from tailbound.kernel import syscalls
from tailbound.kernel.attach import attach
from tailbound_lab.lab import namespaces

_XDP_PASS = 2
#: r0 = XDP_PASS; exit
_PROGRAM = struct.pack("=BBhi", 0xB7, 0, 0, _XDP_PASS) + struct.pack("=BBhi", 0x95, 0, 0, 0)


def load() -> int:
    """Load the program; its file descriptor, the caller's to close.

    Raises:
        CapabilityError: not allowed here (CAP_BPF and CAP_NET_ADMIN), or no BPF in this kernel.
    """
    try:
        return syscalls.prog_load(_PROGRAM, name="tb_pass")
    except OSError as error:
        raise CapabilityError(
            f"cannot load an XDP program: {error}; run it as root (CAP_BPF, CAP_NET_ADMIN)"
        ) from error


class PassThrough:
    """The program on a set of interfaces, until closed.

    Args:
        places: (namespace, interface) pairs.

    Raises:
        CapabilityError: it cannot be loaded.
        AttachError: an interface refuses it; nothing stays attached.
    """

    def __init__(self, places: Iterable[tuple[str, str]]) -> None:
        self._links: list[int] = []
        program = load()
        try:
            for namespace, interface in places:
                self._links.append(namespaces.call(namespace, attach, program, interface, patient=True))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(program)

    def close(self) -> None:
        """Detach everywhere."""
        for link in self._links:
            os.close(link)
        self._links.clear()
