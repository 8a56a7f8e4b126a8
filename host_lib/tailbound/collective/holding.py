"""HOLD: this rank is alive but between steps (an evaluation, a checkpoint), and the others wait for it (clock-16).

The transport thread repeats HOLD; the others take 200 ms of silence for the end of the hold, since a process that has
died or was stopped says nothing either. A call that keeps the GIL for seconds (a tokenizer, ``pickle``, a metric in C)
would look the same to them. So a thread that needs no Python repeats the last HOLD when the transport thread has not.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import numpy as np

from tailbound.collective.speaker import Speaker
from tailbound.kernel.core import address, core
from tailbound.transport.membership import HOLD_EVERY
from tailbound.transport.sockets import Socket, sockaddr
from tailbound.wire.schema import HEADER_BYTES, Flag, PacketType


def hold(job: Speaker, *, over: bool) -> list[bytes]:
    """HOLD to every peer: this rank is between steps, or (``over``) no longer (clock-16). The packets, by peer."""
    head = job.header(PacketType.HOLD, job.sequence.upcoming, 0, flags=Flag.FLUSH if over else 0)
    return [job.tell(peer, head) for peer in job.peers]


class Holding:
    """Says that this rank holds, again and again, until it is computing.

    A hold ends with the next whole step that is launched: a rank that begins to compute when the others' clocks start
    again would miss their deadlines by what a step computes, and stay behind by it for many steps.

    Args:
        job: of this rank; HOLD is repeated over its sender's first socket.

    Attributes:
        again: when to say it again, ns; 0: this rank does not hold.
    """

    def __init__(self, job: Speaker) -> None:
        self._job = job
        self.again = 0
        self._ends = 0  # it is computing again: holds until it has launched a step, or until then
        peers = [job.sender.peers[rank] for rank in job.peers]
        self._heartbeat = Heartbeat(job.sender.sockets[0], peers, HEADER_BYTES, HOLD_EVERY)

    def start(self) -> None:
        """This rank is between steps from now on."""
        self._ends = 0
        self._say(self._job.now())

    def resume(self) -> None:
        """This rank computes again."""
        if self.again:
            self._ends = self._job.now() + self._job.deadlines.start_max

    def launched(self) -> None:
        """The last op of a step has been launched."""
        if self._ends:
            self._end()

    def poll(self, now: int) -> int:
        """Says what is due; returns when to look again, ns (0: this rank does not hold)."""
        if 0 < self._ends <= now:
            self._end()
        elif self.again and now >= self.again:
            self._say(now)
        return self.again

    def stop(self) -> None:
        """Says no more, and counts what the heartbeat has sent."""
        for peer, count in zip(self._job.peers, self._heartbeat.stop(), strict=True):
            self._job.sender.took(peer, count, count * HEADER_BYTES, count)

    def _say(self, now: int) -> None:
        self._heartbeat.said(hold(self._job, over=False), now)
        self.again = now + HOLD_EVERY

    def _end(self) -> None:
        self.again = self._ends = 0
        self.stop()
        hold(self._job, over=True)


class Heartbeat:
    """Repeats what the transport thread says, at the latest ``every`` ns after it was due.

    Args:
        sock: bound UDP socket, of the caller, open for as long as this one runs.
        peers: (IP address, UDP port).
        size: bytes of a packet.
        every: ns.
    """

    def __init__(self, sock: Socket, peers: Sequence[tuple[str, int]], size: int, every: int) -> None:
        self._names = np.frombuffer(b"".join(map(sockaddr, peers)), np.uint8)
        self._packets = np.zeros((len(peers), size), np.uint8)
        self._said = np.zeros(1, np.int64)
        self._sent = np.zeros(len(peers), np.int64)
        self._sock, self._every = sock, every
        self._stop = -1
        self._thread: threading.Thread | None = None

    def said(self, packets: Sequence[bytes], now: int) -> None:
        """The transport thread has just sent ``packets``, by peer; from now on they are repeated."""
        for kept, packet in zip(self._packets, packets, strict=True):
            kept[:] = np.frombuffer(packet, np.uint8)
        self._said[0] = now
        if self._thread is None and packets:
            self._stop = os.eventfd(0, os.EFD_CLOEXEC)
            arguments = (
                self._sock.fileno(), self._stop, self._every, address(self._said), address(self._packets),
                self._packets.shape[1], address(self._names), len(self._packets), address(self._sent),
            )  # fmt: skip
            repeat = core().waits.tb_repeat
            self._thread = threading.Thread(target=repeat, args=arguments, name="tailbound-hold", daemon=True)
            self._thread.start()

    def stop(self) -> list[int]:
        """Nothing is repeated any more once this has returned: how many packets have left for each peer."""
        if self._thread is not None:
            os.eventfd_write(self._stop, 1)
            self._thread.join()
            os.close(self._stop)
            self._thread = None
        sent: list[int] = self._sent.tolist()
        self._sent[:] = 0
        return sent
