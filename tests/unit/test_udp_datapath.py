"""The udp datapath over real sockets on loopback with the sender that belongs to it, and its memory."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cases
import packed
from cases import CODES, OP, SUM_BASE, SUM_ROWS, WIDTH
from partials import partials
from support import await_that
from tailbound.datapath.protocol import MIN_ROWS, allocate, ring_rows
from tailbound.datapath.udp import STOP, Tables, UdpDatapath
from tailbound.errors import ConfigError
from tailbound.kernel.core import core
from tailbound.transport.control import Header, Stamp
from tailbound.transport.queue import SendQueue
from tailbound.transport.sender import Sender
from tailbound.transport.sockets import UdpSocket, room_of
from tailbound.wire import schema
from tailbound.wire.schema import HEADER_BYTES, Event, PacketType, Verdict

RANKS = 3


def joined(**options: Any) -> UdpDatapath:
    """Rank 0 on loopback, in the world of ``cases``, with two peers."""
    path = UdpDatapath(address_of(0), 0, WIDTH, SUM_ROWS, cases.RESULT_ROWS, **options)
    path.reset(cases.FIRST_OP)
    for peer in (1, 2):
        path.store.peers[peer] = (int.from_bytes(socket.inet_aton(address_of(peer)), "little"), 1, 0, 0)
    for name, value in (cases.control_values(RANKS) | {"rank": 0, "live": [0b110, 0, 0, 0]}).items():
        path.store.control[name][0] = value
    return path


def address_of(rank: int) -> str:
    return f"127.0.0.{10 + rank}"


@contextlib.contextmanager
def peer(rank: int) -> Iterator[UdpSocket]:
    with UdpSocket() as sock:
        sock.bind((address_of(rank), 0))
        yield sock


def counted(path: UdpDatapath) -> dict[tuple[int, Verdict], int]:
    table = path.store.ledger["verdict"].copy()  # nonzero raises on what changes under it
    return {(int(s), Verdict(v)): int(table[s, v]) for s, v in np.argwhere(table)}


def controls(path: UdpDatapath) -> list[bytes]:
    core().fast.tb_clear(path.fds()[1])
    return path.source.words(HEADER_BYTES + path.store.width)


def await_control(path: UdpDatapath) -> list[bytes]:
    assert select.select([path.fds()[1]], [], [], 10)[0], "no control packet in 10 s"
    return controls(path)


@pytest.fixture
def path() -> Iterator[UdpDatapath]:
    made = joined()
    yield made
    made.close()


def contributions(sender: int, op: int) -> np.ndarray:
    """Rows of ``sender`` for rank 0, as many as its ring has."""
    packets = np.random.default_rng(sender).integers(1, 256, (SUM_ROWS, HEADER_BYTES + CODES), np.uint8)
    fields = {"cookie": cases.COOKIE, "layout": 1, "map_id": cases.MAP_ID, "rows": SUM_ROWS, "weight": 1}
    head = packed.header(type=PacketType.CONTRIBUTION, op=op, sender=sender, owner=0, contributed=op - 1, **fields)
    places = np.arange(SUM_ROWS, dtype=np.uint32)
    stamp = Stamp(packets, partials(packets), places, exponents=np.zeros(SUM_ROWS, np.int16))
    stamp.write(Header.from_buffer_copy(head), [(0, SUM_ROWS, SUM_ROWS - 1, SUM_BASE, 0, SUM_ROWS)], op)
    return packets


def test_a_rank_is_known_by_its_address_whatever_its_source_port(path: UdpDatapath) -> None:
    """Rule: kernel-8."""
    hold = cases.control_packet(PacketType.HOLD)
    with peer(1) as one, peer(1) as other:
        one.sendto(cases.contribution(1), path.endpoint)
        await_that(lambda: counted(path) == {(1, Verdict.STORED): 1}, "a contribution")
        other.sendto(hold, path.endpoint)
        assert await_control(path) == [hold]
    assert path.lost_on_arrival["receive_buffer"] == 0


def test_nothing_is_added_once_sealing_has_returned(path: UdpDatapath) -> None:
    """Contributions pour in while ops are sealed: what a slot holds when seal returns, it holds for ever.

    Rule: kernel-19.
    """
    go = {r: threading.Semaphore(0) for r in (1, 2)}
    ops = [OP + i for i in range(60)]
    third = SUM_ROWS // 3

    def pour(r: int) -> None:
        with peer(r) as sock:
            queue = SendQueue(Sender([sock], {0: path.endpoint}))
            for op in ops:
                packets = contributions(r, op)
                for some in (packets[:third], packets[third:-third], packets[-third:]):
                    go[r].acquire()
                    queue.submit(op, PacketType.CONTRIBUTION, [(0, some)], 1 << 62, 0)
                    while not queue.empty:
                        queue.pump(1)

    def pour_more(parts: int = 1) -> None:
        for r in (1, 2):
            go[r].release(parts)

    with ThreadPoolExecutor(2) as threads, contextlib.ExitStack() as at_last:
        threads.map(pour, (1, 2))
        at_last.callback(pour_more, 3 * len(ops))
        for n, op in enumerate(ops, 1):
            pour_more()
            await_that(
                lambda op=op: any(e[:2] == (Event.OPENED, op) for e in path.source.take(path.fds()[0])), "the op"
            )
            pour_more()  # some are under way while the op is sealed
            path.source.seal(op, SUM_BASE, SUM_ROWS)
            sums, slots = path.store.sums.copy(), path.store.slots.copy()
            pour_more()  # and some come when it has been
            # every packet of the op is counted before the next op may begin
            await_that(lambda n=n: sum(counted(path).values()) >= n * 2 * SUM_ROWS, "all packets")
            assert path.store.sums.tobytes() == sums.tobytes()
            assert path.store.slots.tobytes() == slots.tobytes()
    late = sum(n for (_, verdict), n in counted(path).items() if verdict == Verdict.LATE)
    assert late >= len(ops) * 2 * third


def test_a_full_receive_buffer_is_counted() -> None:
    small, hold = joined(receive_buffer=4096), cases.control_packet(PacketType.HOLD)
    state = small._tables.state
    state[STOP] = 1
    os.eventfd_write(small._wake, 1)
    small._thread.join()  # the socket fills
    with peer(1) as sock:
        for _ in range(500):
            sock.sendto(hold, small.endpoint)
        state[STOP] = 0
        small._thread = small._start()
        taken = await_control(small)

        def counted_drops() -> int:  # the count comes with the next packet that finds room
            sock.sendto(hold, small.endpoint)
            taken.extend(await_control(small))
            return small.lost_on_arrival["receive_buffer"]

        await_that(counted_drops, "packets that the kernel dropped")
    assert 0 < small.lost_on_arrival["receive_buffer"] < 500

    def all_taken() -> bool:  # one more may be on its way
        taken.extend(controls(small))
        return counted(small) == {(1, Verdict.CONTROL_PASSED): len(taken)}

    await_that(all_taken, "what was counted")
    small.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda tables: tables.source.seal(7, 60, 8),
        lambda tables: core().fast.tb_order(tables.source.pointer),
        lambda tables: tables.put_key(1, np.ones(schema.key_bytes(64) // 8, np.uint64)),
    ],
)
def test_no_call_drops_the_gil(call: Callable[[Tables], None]) -> None:
    """Another thread could keep it, and the engine would wait for that after each seal."""
    tables, go, ran, before = Tables(allocate(64, 64, 64)), threading.Lock(), list[bool](), sys.getswitchinterval()
    buffer, source = np.zeros(64 << 20, np.uint8), np.zeros(4, np.uint32)
    # has the mutex for a million packets, some tens of ms, without the GIL
    packets = tables.address, buffer.ctypes.data, len(buffer), HEADER_BYTES, source.ctypes.data, 1, 0, None, 0

    def wants_the_gil() -> None:
        with go:
            ran.append(True)

    go.acquire()
    with ThreadPoolExecutor() as threads:
        try:
            threads.submit(wants_the_gil)
            threads.submit(core().waits.tb_take_in, *packets)
            await_that(tables.arrays["ledger"]["verdict"][schema.UNKNOWN_SENDER].any, "a packet that is taken in")
            sys.setswitchinterval(1000)  # without a request the GIL changes hands only where it is dropped
            go.release()
            call(tables)
            assert not ran
        finally:
            sys.setswitchinterval(before)
    assert ran


def receivers() -> set[threading.Thread]:
    gc.collect()  # what earlier tests left in cycles is closed now, and not while this one counts
    return {thread for thread in threading.enumerate() if thread.name == "tailbound-udp"}


def test_datapaths_that_are_closed_or_forgotten_leave_no_thread_descriptor_or_port() -> None:
    before, descriptors = receivers(), len(os.listdir("/proc/self/fd"))
    # an address that nobody else uses: another process could take the port in between
    place = f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}.77", 0
    for _ in range(20):
        path = UdpDatapath(*place, 64, 16, 16)
        place = path.endpoint
        path.close()
        path.close()
    path = UdpDatapath(*place, 64, 16, 16)
    assert len(receivers() - before) == 1
    del path
    assert (receivers(), len(os.listdir("/proc/self/fd"))) == (before, descriptors)


def test_a_port_that_is_taken_and_an_address_of_another_host_are_refused(path: UdpDatapath) -> None:
    for place, words in (
        (path.endpoint, "is taken: choose another"),
        (("192.0.2.1", 0), r"cannot bind 192.0.2.1:0.*give a local address"),
    ):
        with pytest.raises(ConfigError, match=words):
            UdpDatapath(*place, WIDTH, SUM_ROWS, 64)


def test_no_longer_queue_stands_behind_a_slow_link_than_with_xdp(path: UdpDatapath) -> None:
    """With four times as much, echoes waited behind rows, and senders slowed down for a queue of their own."""
    assert path.socket.room() <= 2 * room_of(1)  # the kernel doubles what is asked for


widths = st.integers(1, 139).map(lambda k: k * schema.WIDTH_STEP)


@given(mib=st.floats(1, 1024), width=widths, workers=st.integers(1, schema.MAX_RANKS))
def test_rings_fit_the_budget_and_hold_an_owners_share(mib: float, width: int, workers: int) -> None:
    sum_rows, result_rows = ring_rows(mib, width, workers)
    for rows in (sum_rows, result_rows):
        assert rows >= MIN_ROWS
        assert rows & (rows - 1) == 0
    assert result_rows * width <= mib * 2**20 < 2 * result_rows * width
    assert sum_rows * workers >= result_rows
    assert sum_rows == MIN_ROWS or sum_rows // 2 * workers < result_rows
    if workers > 1:  # half of the ring in flight, and one owner missing
        assert sum_rows * (workers - 1) >= result_rows // 2


@pytest.mark.parametrize(
    ("make", "sizes", "named"),
    [
        *((ring_rows, (mib, 1408, 4), "ring of") for mib in (0, -1, 0.01, float("nan"), float("inf"), 2.0**40)),
        *((ring_rows, (8, width, 4), "width") for width in (0, -64, 100, 1500)),
        *((ring_rows, (8, 1408, workers), "workers") for workers in (0, -1, 257)),
        *((allocate, (width, 16, 16), f"width of {width}") for width in (0, 1400)),
        *((allocate, (64, rows, 16), f"sum_rows is {rows}") for rows in (15, 0)),
        *((allocate, (64, 16, rows), f"result_rows is {rows}") for rows in (48, -16)),
    ],
)
def test_sizes_that_cannot_be_are_refused(make: Callable[..., object], sizes: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make(*sizes)
