"""What a rank that comes back is told, and how the others take it in (clock-32); deaths by lifeline."""

from __future__ import annotations

import json
import queue
import re
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from support import PATIENCE, MemoryStore, greeting
from tailbound.collective import comeback
from tailbound.collective.comeback import Life, Part, find_part
from tailbound.collective.communicator import Communicator
from tailbound.errors import LayoutError, TransportError
from tailbound.transport import rendezvous
from tailbound.transport.config import Config
from tailbound.transport.lifeline import Lifelines
from tailbound.transport.membership import Membership
from tailbound.wire.schema import op_label

NEW = {rank: Life(Part.UNKNOWN, 10 + rank) for rank in range(4)}


#: A new process, its peers, and what it is told.
PARTS: dict[str, tuple[int, dict[int, Life | None], Life | str]] = {
    "one is inside": (0, {1: None, 2: Life(Part.INSIDE, 7, 3, 99)}, Life(Part.OUTSIDE, 7, 3, 99)),
    "all are new": (0, {1: NEW[1], 2: NEW[2], 3: NEW[3]}, Life(Part.BEGINS, 10)),
    "and the lowest proposes": (3, {0: NEW[0], 1: NEW[1], 2: NEW[2]}, Life(Part.BEGINS, 10)),
    "one outside knows the cookie of before": (1, {0: Life(Part.OUTSIDE, 5), 2: NEW[2]}, Life(Part.BEGINS, 11)),
    "one has begun": (0, {1: NEW[1], 2: Life(Part.BEGINS, 99), 3: Life(Part.OUTSIDE, 5)}, Life(Part.BEGINS, 99)),
    "one does not answer": (0, {1: None, 2: Life(Part.OUTSIDE, 7)}, "[1] do not answer"),
}


@pytest.mark.parametrize(("rank", "peers", "found"), PARTS.values(), ids=PARTS)
def test_a_new_process_finds_its_part(rank: int, peers: dict[int, Life | None], found: Life | str) -> None:
    def pull(peer: int, *_: object) -> bytes:
        if (life := peers[peer]) is None:
            raise TransportError("nobody is there: start it")
        return struct.pack("!BIHI", *life)

    if isinstance(found, Life):
        assert find_part(rank, 10 + rank, peers, pull, 0) == found
    else:
        with pytest.raises(TransportError, match=re.escape(found)):
            find_part(rank, 10 + rank, peers, pull, 0)


def test_peers_are_asked_at_the_same_time_and_none_is_waited_for_where_one_is_inside() -> None:
    """One whose host is off takes seconds."""
    together, over, waited = threading.Barrier(4), threading.Event(), list[bool]()

    def pull(rank: int, *_: Any) -> bytes:
        together.wait(PATIENCE)
        if rank != 2:
            waited.append(over.wait(PATIENCE))
        return struct.pack("!BIHI", Part.INSIDE, 7, 3, 99)

    assert find_part(0, 5, [1, 2, 3, 4], pull, 0) == Life(Part.OUTSIDE, 7, 3, 99)
    assert not waited
    over.set()


def test_a_job_that_begins_anew_has_another_cookie_and_a_rank_that_comes_back_into_it_that_one() -> None:
    """With the cookie of before, what kernels keep of the run before would count in this one."""
    ranks, store = 3, MemoryStore()

    def live(rank: int, step: int = 3 << 20) -> Communicator:  # to which step 0 is still to come
        config = Config(rank, ranks, width=64, key_file="drawn", first_step=step)
        return Communicator(store, config, datapath="udp", timeout=PATIENCE, elastic=True)

    with ThreadPoolExecutor(ranks) as threads:
        cookies, life = list[int](), []
        for _ in range(3):
            for one in life:
                one.close()
            life = list(threads.map(live, range(ranks)))
            assert {one.part for one in life} == {Part.BEGINS}
            for rank, one in enumerate(life):  # one that dies is known to be dead in this life, too
                assert sorted(one.reliable._lifelines._newest) == [peer for peer in range(ranks) if peer != rank]
            cookies += {one.job.cookie for one in life}
        assert len(set(cookies)) == len(cookies) == 3
        for one in life:
            one.part = Part.INSIDE
        life[:2] = [(life[rank].close(), live(rank, 0))[1] for rank in (0, 1)]
        assert (life[0].part, life[0].job.cookie) == (Part.OUTSIDE, cookies[-1])
        entrance = life[2].entrance()  # two that come back together are told that both are away
        found = comeback.decode(entrance, ranks)._replace(cookie=cookies[0])
        with pytest.raises(LayoutError, match="rank 0 came back into a run of the job that has ended"):
            life[0].enter(comeback.encode(found, ranks))
        members = life[0].job.membership
        members.bye(1, (members._before.get(1, 0) + 1) & 0xFFFFFFFF)  # recorded of the process before, and sent again
        members.hold(2, life[0].job.now())
        life[2].job._stamps.newest[0] = 1 << 62  # the clock was set back since
        assert [life[rank].enter(entrance) for rank in (1, 0)] == [{2}, {1, 2}]
        assert life[0]._engine.ask(lambda: (members.live, members.holding(life[0].job.now()))) == ([1, 2], 0)
        assert life[1]._engine.ask(lambda: life[1].job.membership.live) == [2, 0]
        assert life[0]._engine.ask(life[0].job.stamp) > 1 << 62
        assert all(life[0].job._stamps.newest[rank] for rank in (1, 2))
        outcomes = [done.result(PATIENCE) for done in [one.allreduce(np.ones(640, np.float32)) for one in life]]
        assert not any(outcome.expected - outcome.delivered for outcome in outcomes)
        for one in life:
            one.close()


SUSPECT = [("absent", {2}, op) for op in range(3)]
AHEAD = [("heard", 2, 8), ("died", 2, op_label(7, 3)), ("absent", (), op_label(7, 3)), ("absent", (), op_label(9, 1))]
#: Words on three peers, as (method, arguments), and who of them is live then.
WORDS: dict[str, tuple[list[tuple[Any, ...]], list[int]]] = {
    "who comes back after a goodbye counts as new": ([("bye", 1, 0), ("back", 1, 9)], [1, 2, 3]),
    "and who comes back as a suspect": ([*SUSPECT, ("heard", 2, 5), ("back", 2, 9)], [1, 2, 3]),
    "as many have gone as once before": ([("bye", 1, 0), ("back", 1, 9), ("bye", 3, 0)], [1, 2]),
    "a late goodbye is that of the process before": ([("back", 1, 9), ("bye", 1, op_label(8, 5))], [1, 2, 3]),
    "the new one may say it before its first op": ([("back", 1, 9), ("bye", 1, op_label(9, 0) - 1)], [2, 3]),
    "rows that the dead had sent ahead do not bring it back": (AHEAD, [1, 3]),
    "who lives after all is back two steps later": ([*AHEAD, ("absent", (), op_label(10, 0))], [1, 2, 3]),
    "a suspect that dies is not forgiven what it sent before": (
        [*SUSPECT, ("died", 2, 4), ("absent", (), 5)], [1, 3],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("words", "live"), WORDS.values(), ids=WORDS)
def test_who_is_live_after_an_end_and_a_return(words: list[tuple[Any, ...]], live: list[int]) -> None:
    members = Membership(4, 0)
    for what, *arguments in words:
        getattr(members.contribution if what == "absent" else members, what)(*arguments)
    assert members.live == live


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
    here = Lifelines(said.put, Mock())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = [(socket.create_connection(listener.getsockname()), listener.accept()[0]) for _ in range(3)]
    for rank, (end, _) in zip((3, 3, 5), ends, strict=True):
        here.hold(rank, end)
    ends[0][1].close()  # before the next, so that it is looked at before
    ends[2][1].close()
    assert said.get(timeout=30) == 5
    ends[1][1].close()
    assert said.get(timeout=30) == 3
    here.close()
    assert said.empty()
