"""Programs at the way out of an interface (tc egress), by TCX link (Linux 6.6).

A link replaces nobody: programs and filters of others stay where they are and see the same packets. It goes with the
last descriptor and pin, so that a killed owner leaves nothing.
"""

from __future__ import annotations

import errno
import os

from tailbound.errors import CapabilityError
from tailbound.kernel import net, syscalls


class TcxLink:
    """A program in its place.

    Args:
        program: descriptor of a program of type tc.
        interface: whose way out it is put at.

    Attributes:
        fd: descriptor of the link; -1: it is closed.

    Raises:
        ConfigError: no such interface.
        CapabilityError: no privilege, or a kernel without TCX.
    """

    def __init__(self, program: int, interface: str) -> None:
        self.fd = -1
        index = net.index_of(interface)
        try:
            self.fd = syscalls.link_create(program, index, 0, syscalls.ATTACH_TCX_EGRESS)
        except OSError as error:
            hint = {
                errno.EPERM: "it needs CAP_NET_ADMIN and CAP_BPF",
                errno.EINVAL: "this kernel has no TCX (Linux 6.6)",
            }.get(error.errno or 0, error.strerror)
            raise CapabilityError(
                f"cannot attach to tc egress of {interface} (errno {error.errno}: {hint}); training works without: "
                "results go to each peer separately, which takes more processor time"
            ) from error

    def close(self) -> None:
        """Take the program off; may be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
