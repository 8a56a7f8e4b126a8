"""What a rank that comes back is told, and how the others take it in (clock-32); deaths by lifeline."""

from __future__ import annotations

import json
import queue
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support import PATIENCE, MemoryStore, greeting
from tailbound.collective.comeback import Life, Part, find_part
from tailbound.collective.communicator import Communicator, Training
from tailbound.errors import LayoutError, TransportError
from tailbound.transport import rendezvous
from tailbound.transport.config import Config
from tailbound.transport.lifeline import Lifelines
from tailbound.transport.membership import Membership
from tailbound.wire.schema import op_label


def _find(lives: dict[int, Life | None], rank: int = 0, cookie: int = 10) -> Life:
    def pull(rank: int, name: str, *_: object) -> bytes:
        life = lives[rank]
        if life is None:
            raise TransportError("nobody is there: start it")
        return struct.pack("!BIQH", *life)

    return find_part(rank, cookie, lives, pull, 0)


def test_a_new_process_finds_its_part() -> None:
    assert _find({1: None, 2: Life(Part.INSIDE, 7, 1 << 40, 3)}) == Life(Part.OUTSIDE, 7, 1 << 40, 3)
    with pytest.raises(TransportError, match=r"\[1\] do not answer"):
        _find({1: None, 2: Life(Part.OUTSIDE, 7)})


def test_peers_are_asked_for_their_part_at_the_same_time() -> None:
    """One that does not answer takes seconds; the lowest is asked when the others have answered."""
    together, asked = threading.Barrier(3), list[int]()

    def pull(rank: int, *_: Any) -> bytes:
        asked.append(rank)
        if rank > 1:
            together.wait(PATIENCE)
        raise TransportError("silent")

    with pytest.raises(TransportError, match=r"\[1, 2, 3, 4\] do not answer"):
        find_part(0, 5, [1, 2, 3, 4], pull, 0)
    assert asked[-1] == 1


def test_a_job_that_begins_anew_has_the_cookie_of_its_lowest_new_rank() -> None:
    """Or of who has begun already. One that came back before, and is still outside, knows the cookie of before only."""
    new = {rank: Life(Part.UNKNOWN, 10 + rank) for rank in range(4)}
    for rank in range(4):
        others = {other: life for other, life in new.items() if other != rank}
        assert _find(others, rank, 10 + rank) == Life(Part.BEGINS, 10)
    assert _find({0: Life(Part.OUTSIDE, 5), 2: new[2]}, 1, 11) == Life(Part.BEGINS, 11)
    assert _find({1: new[1], 2: Life(Part.BEGINS, 99), 3: Life(Part.OUTSIDE, 5)}) == Life(Part.BEGINS, 99)


def test_a_job_that_begins_anew_has_another_cookie_and_a_rank_that_comes_back_into_it_that_one() -> None:
    """With the cookie of before, what kernels keep of the run before would count in this one."""
    ranks, store, training = 3, MemoryStore(), Training(elastic=True)

    def live(rank: int) -> Communicator:
        config = Config(rank, ranks, width=64, authenticate="on", first_step=5)
        return Communicator(store, config, datapath="udp", timeout=PATIENCE, training=training)

    with ThreadPoolExecutor(ranks) as threads:
        cookies, life = [], []
        for _ in range(3):
            for one in life:
                one.close()
            life = list(threads.map(live, range(ranks)))
            assert {one.part for one in life} == {Part.BEGINS}
            for rank, one in enumerate(life):  # one that dies is known to be dead in this life, too
                assert sorted(one.reliable._lifelines._newest) == [peer for peer in range(ranks) if peer != rank]
            assert {one._ring.at for one in life} == {5}
            (cookie,) = {one.job.cookie for one in life}
            cookies.append(cookie)
        assert len(set(cookies)) == 3
        for one in life:
            one.part = Part.INSIDE
        life[0].close()
        life[0] = live(0)
        assert (life[0].part, life[0].job.cookie) == (Part.OUTSIDE, cookies[-1])
        entrance = json.loads(life[1].entrance()) | {"cookie": cookies[0]}
        with pytest.raises(LayoutError, match="rank 0 came back into a run of the job that has ended"):
            life[0].enter(json.dumps(entrance).encode())
        members = life[0].job.membership
        members.bye(1, (members._before.get(1, 0) + 1) & 0xFFFFFFFF)  # recorded of the process before, and sent again
        members.hold(2, life[0].job.now())
        assert life[0].enter(life[1].entrance()) == {1, 2}
        assert life[0]._engine.ask(lambda: (members.here, members.holding(life[0].job.now()))) == ([1, 2], 0)
        assert all(life[0].job._stamps._floor[rank] for rank in (1, 2))
        for one in life:
            one.close()


def test_who_comes_back_counts_as_new() -> None:
    members = Membership(4, 0)
    for op in range(3):
        members.contribution.absent({2}, op)
    members.bye(1, 0)
    members.heard(2, 5)
    assert (members.live, members.owners, members.dead(9)) == ([3], [2, 3], {2})
    for rank in (1, 2):
        members.back(rank, 9)
    assert (members.live, members.owners, members.here, members.dead(10)) == ([1, 2, 3], [1, 2, 3], [1, 2, 3], set())
    members.bye(3, 0)  # as many have gone as once before
    assert members.live == [1, 2]


def test_a_late_goodbye_is_that_of_the_process_before() -> None:
    """What the new one says is of the step that it came back with, or of the op before where it did nothing yet."""
    members = Membership(4, 0)
    members.back(1, 9)
    members.bye(1, op_label(8, 5))
    assert members.here == [1, 2, 3]
    members.bye(1, op_label(9, 0) - 1)
    assert members.here == [2, 3]


def test_rows_that_a_dead_rank_had_sent_ahead_do_not_bring_it_back() -> None:
    """It was a step ahead of this one. Who lives after all, and has lost a connection only, is back two steps later."""
    members = Membership(4, 0)
    members.heard(2, 8)
    assert members.died(2, op_label(7, 3))
    assert members.live == [1, 3]
    for op in (op_label(7, 3), op_label(8, 0), op_label(9, 1)):
        members.contribution.absent((), op)
        assert members.live == [1, 3]
    members.contribution.absent((), op_label(10, 0))
    assert members.live == [1, 2, 3]


def test_a_suspect_that_dies_is_not_forgiven_for_what_it_sent_before() -> None:
    members = Membership(4, 0)
    for op in range(3):
        members.contribution.absent({2}, op)
    members.died(2, 4)
    members.contribution.absent((), 5)
    assert members.live == [1, 3]


def test_the_store_tells_whether_a_job_is_under_way() -> None:
    store, said = MemoryStore(), [greeting(rank, ranks=2, cookie=9) for rank in range(2)]
    assert rendezvous.under_way(store, 1, 2, "job") is None
    for rank, one in enumerate(said):
        store.set(f"job/greeting/{rank}", json.dumps(vars(one)))
    with pytest.raises(TransportError, match="before its job had begun"):
        rendezvous.under_way(store, 1, 2, "job")
    rendezvous.begin(store, "job")
    texts = rendezvous.under_way(store, 1, 2, "job")
    assert [g.cookie for g in rendezvous.come_back(said[1], texts)] == [9, 9]
    with pytest.raises(LayoutError, match=r"address '10.0.0.2' and had '10.0.0.1'"):
        rendezvous.come_back(greeting(1, ranks=2, address="10.0.0.2"), texts)


def test_the_end_of_a_process_before_says_nothing_of_the_one_that_has_come_back() -> None:
    said: queue.Queue[int] = queue.Queue()
    here, ends = Lifelines(said.put), [socket.socketpair() for _ in range(3)]
    for rank, (end, _) in zip((3, 3, 5), ends, strict=True):
        here.hold(rank, end)
    ends[0][1].close()  # before the next, so that it is looked at before
    ends[2][1].close()
    assert said.get(timeout=30) == 5
    ends[1][1].close()
    assert said.get(timeout=30) == 3
    here.close()
    assert said.empty()
