"""The result half of an all-reduce, as its sender sees it: a send for every peer, or one that the kernel clones.

One worker of a lab sends its share of the results of a bucket to all others, over UDP GSO, in turn in both ways.
Counted are its system calls and the CPU time of its process, in which nearly all that the network does with a burst
happens, too: clones, segmentation, the bridge, and delivery up to the receivers' sockets or XDP programs (softirqs run
on the sender's CPU). The receivers count packets and do nothing else; they read what came between two measurements.

Bursts leave by the send queue, as those of a job do, up to 32 in a system call.

Ports come in two kinds: ``gso`` take buffers of 64 KB as they are, as NICs with USO do; ``xdp`` carry a native XDP
program, before which a veth cuts them up in the sender's call.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.datapath.udp import UDP_GRO
from tailbound.datapath.xdp import XdpDatapath
from tailbound.errors import TailboundError
from tailbound.kernel.fanout import Fanout
from tailbound.transport.batch import stagger
from tailbound.transport.queue import SendQueue
from tailbound.transport.sender import Sender, Shared
from tailbound.transport.sockets import Socket, reserve, sending_sockets
from tailbound.wire.packets import header, packet
from tailbound.wire.schema import HEADER_BYTES, PacketType, Verdict
from tailbound_lab.bench.save import save
from tailbound_lab.lab.cluster import Cluster

__all__ = ["PORTS", "WORKERS", "run"]

PORTS = ("gso", "xdp")
WORKERS = (2, 4, 8)
WIDTH, PORT, RINGS = 1408, 7400, 1024
SIZE = 25 << 20
_NEVER = 1 << 62
#: Seconds that packets may be under way before they count as lost.
_PATIENCE = 5.0


class Op(NamedTuple):
    """One measurement."""

    syscalls: int
    cpu_ns: int
    packets: int  #: that arrived


class Receivers:
    """What peers do with packets: count them. Sockets with GRO, or XDP programs of a job that has not begun."""

    def __init__(self, lab: Cluster, ports: str, stack: ExitStack) -> None:
        self._sockets: list[socket.socket] = []
        self._programs: list[XdpDatapath] = []
        self._buffer = bytearray(1 << 16)
        self._read = 0
        for worker in lab.workers:
            if ports == "xdp":
                path = lab.run(worker.rank, XdpDatapath.attach, worker.interface, PORT, WIDTH, RINGS, RINGS)
                stack.callback(path.close)
                self._programs += [path] if worker.rank else []
            elif worker.rank:
                self._sockets.append(stack.enter_context(lab.run(worker.rank, _listen, worker.address)))

    def packets(self) -> int:
        """Packets that have arrived so far."""
        for sock in self._sockets:
            with contextlib.suppress(BlockingIOError):
                while True:
                    self._read += -(-sock.recv_into(self._buffer) // (HEADER_BYTES + WIDTH))
        return self._read + sum(int(path.store.ledger["verdict"][:, Verdict.INACTIVE].sum()) for path in self._programs)


def _listen(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setblocking(False)
    reserve(sock, socket.SO_RCVBUF, 256 << 20)
    sock.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
    sock.bind((address, PORT))
    return sock


class Counted:
    """A ``Socket`` that counts the system calls of another one."""

    def __init__(self, sock: Socket) -> None:
        self._sock = sock
        self.calls = 0

    def fileno(self) -> int:
        """See ``Socket``."""
        return self._sock.fileno()

    def room(self) -> int:
        """See ``Socket``."""
        return self._sock.room()

    def send_one(self, packet: bytes, target: tuple[str, int]) -> int:
        """See ``Socket``."""
        self.calls += 1
        return self._sock.send_one(packet, target)

    def send_many(self, messages: int, count: int) -> tuple[int, int]:
        """See ``Socket``."""
        self.calls += 1
        return self._sock.send_many(messages, count)


class Bench:
    """A lab of ``workers`` with ports of one kind, in which rank 0 sends ``rows`` results in either way."""

    def __init__(self, workers: int, ports: str, size: int, stack: ExitStack) -> None:
        lab = stack.enter_context(Cluster(workers))
        self._receivers = Receivers(lab, ports, stack)
        me = lab.workers[0]
        peers = {rank: (lab.workers[rank].address, PORT) for rank in stagger(0, workers)}
        sockets = lab.run(0, sending_sockets, me.address, workers - 1)
        (shared,) = lab.run(0, sending_sockets, me.address, 1)
        for sock in (*sockets, shared):
            stack.enter_context(sock)
        self._fanout = lab.run(0, Fanout.attach, me.interface, shared.getsockname()[1], PORT)
        stack.callback(self._fanout.close)
        self._fanout.set_peers(0, {rank: address for rank, (address, _) in peers.items()})
        self._fanout.live(peers)
        # The first socket is for single packets, of which there are none; bursts have one a peer.
        self._sockets = [Counted(sock) for sock in (sockets[0], *sockets)]
        sender = Sender(self._sockets, peers)
        self._shared = Shared("fanout", (shared,), ranks=tuple(peers))
        number = sender.share(self._shared)
        self._sockets.append(Counted(shared))
        sender.sockets[-1] = self._sockets[-1]
        self._queue = SendQueue(sender)
        self._rows = _results(-(-size // 4 // WIDTH // workers))
        self._expected = len(self._rows) * (workers - 1)
        self._peers = peers
        self._to = {"peers": list(peers), "fanout": [number]}
        self._waits = 0
        for rank in peers:  # alone, which shows the program the way
            sender.send(rank, bytes(packet(header(type=PacketType.PROBE, owner=rank), b"")))
        self._arrive(len(peers), 0, "the way to the peers")

    def op(self, name: str) -> Op:
        """The results of one all-reduce.

        Raises:
            TailboundError: packets are missing: what was measured is not what was to be.
        """
        assert self._fanout.lead is not None
        self._shared.target = self._peers[self._fanout.lead]
        runs = [(rank, self._rows) for rank in self._to[name]]
        before, arrived = self._syscalls(), self._receivers.packets()
        begin = time.process_time_ns()
        self._queue.submit(1, PacketType.RESULT, runs, _NEVER, None, time.monotonic_ns())
        while not self._queue.empty:
            self._await_room()
            self._queue.pump(time.monotonic_ns())
        cpu = time.process_time_ns() - begin
        packets = self._arrive(self._expected, arrived, name)
        return Op(self._syscalls() - before, cpu, packets)

    def _arrive(self, expected: int, before: int, name: str) -> int:
        """Packets that have come beyond ``before``, once these are as many as expected."""
        until = time.monotonic() + _PATIENCE
        while (packets := self._receivers.packets() - before) < expected:
            if time.monotonic() > until:
                raise TailboundError(f"bench fanout, {name}: {packets} of {expected} packets arrived; run it again")
            time.sleep(0.001)
        return packets

    def _await_room(self) -> None:
        """Sleeps until a full socket has room, or until the queue is to be looked at again."""
        again = self._queue.again - time.monotonic_ns()
        if again <= 0:
            return
        self._waits += 1
        full = select.poll()
        for i in self._queue.full:
            full.register(self._sockets[i], select.POLLOUT)
        full.poll(again * 1e-6)

    def _syscalls(self) -> int:
        """System calls so far: sends, whatever became of them, and waits for room."""
        return sum(sock.calls for sock in self._sockets) + self._waits


def _results(rows: int) -> NDArray[np.uint8]:
    """u8[rows, stride], packets of results."""
    payload = np.random.default_rng(7).integers(1, 256, WIDTH, np.uint8).tobytes()
    data = bytes(packet(header(type=PacketType.RESULT, rows=rows), payload))
    return np.tile(np.frombuffer(data, np.uint8), (rows, 1))


def run(
    json_path: Path | None = None,
    workers: Sequence[int] = WORKERS,
    ports: Sequence[str] = PORTS,
    size: int = SIZE,
    quick: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Measures both ways in turn, with every kind of port and number of workers.

    Args:
        size: bytes of float32 of the bucket whose results are sent.

    Returns:
        Rows with ``name, ports, workers, packets, syscalls_per_op, cpu_ms_per_op``, medians over ops; also written to
        ``json_path``. ``packets`` arrived at all peers together.

    Raises:
        CapabilityError: not root, or the kernel or a compiler is missing something.
        TailboundError: packets were lost.
    """
    ops = 10 if quick else 60
    rows = []
    for kind in ports:
        for count in workers:
            progress(f"{kind} ports, {count} workers")
            found: dict[str, list[Op]] = {"peers": [], "fanout": []}
            with ExitStack() as stack:
                bench = Bench(count, kind, size, stack)
                for i in range(ops + 2):
                    for name in sorted(found, reverse=bool(i % 2)):
                        found[name].append(bench.op(name))
            rows += [_row(name, kind, count, measured[2:]) for name, measured in found.items()]
    save(rows, json_path)
    return rows


def _row(name: str, ports: str, workers: int, ops: Sequence[Op]) -> dict[str, Any]:
    return {
        "name": name,
        "ports": ports,
        "workers": workers,
        "packets": ops[0].packets,
        "syscalls_per_op": float(np.median([op.syscalls for op in ops])),
        "cpu_ms_per_op": float(np.median([op.cpu_ns for op in ops])) / 1e6,
    }
