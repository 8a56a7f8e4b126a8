"""A flow of the kernel's TCP between two workers of a lab, through the cables that carry a job's packets."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

from tailbound.errors import ConfigError
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.namespaces import write_sysctl

#: Of a full segment: its payload (timestamps take 12 bytes), and what tc counts, Ethernet's header included.
_PAYLOAD, _SEGMENT = 1448, 1514
_CHUNK = 1 << 16
#: ``struct tcp_info``: where the smoothed round trip is, in us, and how many segments were sent again.
_RTT_AT, _RETRANSMITTED_AT = 68, 100
_LISTEN_SECONDS = 10.0
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


def check_congestion(names: Sequence[str]) -> None:
    """Tries each on a socket, which loads its module where there is one.

    Raises:
        ConfigError: this kernel has no such congestion control, or does not let this process use it.
    """
    for name in names:
        with socket.socket() as probe:
            try:
                probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
            except OSError as error:
                there = ", ".join(_AVAILABLE.read_text().split())
                raise ConfigError(
                    f"TCP cannot use the congestion control {name!r} here ({error.strerror}): take one of {there}"
                ) from error


class Flow:
    """One bulk transfer over the data link from its making until the end of the ``with`` block.

    Args:
        lab: built.
        source, target: workers.
        congestion: the kernel's name of a congestion control, ``reno`` say.
        ecn: both ends know of marks.

    Attributes:
        kind: what it is, in words.

    Raises:
        OSError: there is no such congestion control here.
    """

    def __init__(self, lab: Cluster, source: int, target: int, *, congestion: str, ecn: bool) -> None:
        self.kind = f"{congestion} ECN" if ecn else congestion
        address = lab.workers[target].address
        for rank in (source, target):
            lab.run(rank, write_sysctl, "net/ipv4/tcp_ecn", int(ecn))
        self._ended = False
        self._received = 0
        with contextlib.ExitStack() as opened:
            listening = opened.enter_context(lab.run(target, socket.create_server, (address, 0)))
            listening.settimeout(_LISTEN_SECONDS)
            self._out = opened.enter_context(lab.run(source, socket.socket))
            self._out.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
            self._out.connect(listening.getsockname())
            self._in = opened.enter_context(listening.accept()[0])
            opened.pop_all()
            listening.close()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._send, self._receive)]

    def __enter__(self) -> Flow:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        for end in (self._out, self._in):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self._out, self._in):
            end.close()

    @property
    def delivered(self) -> int:
        """Bytes on the wire that have come so far, headers included, as the lab counts a link's rate."""
        return self._received * _SEGMENT // _PAYLOAD

    @property
    def rtt_ms(self) -> float:
        """The smoothed round trip of late, as the kernel knows it."""
        return self._info(_RTT_AT) / 1e3

    @property
    def retransmitted(self) -> int:
        """Segments that were sent again so far."""
        return self._info(_RETRANSMITTED_AT)

    def _info(self, at: int) -> int:
        found: int = struct.unpack_from("=I", self._out.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), at)[0]
        return found

    def _send(self) -> None:
        chunk = bytes(_CHUNK)
        with contextlib.suppress(OSError):
            while not self._ended:
                self._out.sendall(chunk)

    def _receive(self) -> None:
        into = bytearray(_CHUNK)
        with contextlib.suppress(OSError):
            while length := self._in.recv_into(into):
                self._received += length
