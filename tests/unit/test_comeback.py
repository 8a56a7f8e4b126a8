"""What a rank that comes back is told, and how the others take it in (clock-32); deaths by lifeline."""

from __future__ import annotations

import json
import queue
import socket
from collections.abc import Callable

import numpy as np
import pytest

from support import MemoryStore
from tailbound.collective.comeback import Entrance, Part, decode, encode, find_part
from tailbound.errors import LayoutError, TransportError
from tailbound.transport import rendezvous
from tailbound.transport.agreement import Agreed, Content
from tailbound.transport.lifeline import Lifelines
from tailbound.transport.membership import Membership
from tailbound.transport.rendezvous import Greeting
from tailbound.transport.sequence import Position

MAPS = (Agreed(0, 0, Content((1, 1, 1))), Agreed(256, 9, Content((2, 0, 1), rotate=False)))
ENTRANCE = Entrance(Position(7, 1 << 31, (1, 2, 3), 256, (0, 0, 2), rotate=False), MAPS, {})


def test_an_entrance_comes_back() -> None:
    scales = {(0, 1000, 0, 34): np.array([-3, 7], np.int16)}
    found = decode(encode(Entrance(ENTRANCE.position, MAPS, scales), 3), 3)
    assert (found.position, found.agreed) == (ENTRANCE.position, MAPS)
    assert {key: known.tolist() for key, known in found.exponents.items()} == {(0, 1000, 0, 34): [-3, 7]}


@pytest.mark.parametrize(("name", "value"), [("position", {}), ("maps", ""), ("exponents", [[1, 2]]), ("exponents", 3)])
def test_noise_is_no_entrance(name: str, value: object) -> None:
    told = json.loads(encode(ENTRANCE, 3)) | {name: value}
    for data in (b"", b"{}", json.dumps(told).encode(), encode(ENTRANCE, 3)[:-9]):
        with pytest.raises(TransportError, match="is no"):
            decode(data, 3)


def _answers(parts: dict[int, Part | None]) -> Callable[..., bytes]:
    def pull(rank: int, *_: object) -> bytes:
        part = parts[rank]
        if part is None:
            raise TransportError("nobody is there: start it")
        return bytes([part])

    return pull


def test_a_new_process_finds_its_part() -> None:
    assert find_part([1, 2], _answers({1: None, 2: Part.INSIDE}), 0) == Part.OUTSIDE
    assert find_part([1, 2], _answers({1: Part.OUTSIDE, 2: Part.BEGINS}), 0) == Part.BEGINS
    with pytest.raises(TransportError, match=r"\[1\] do not answer"):
        find_part([1, 2], _answers({1: None, 2: Part.OUTSIDE}), 0)


def test_who_comes_back_counts_as_new() -> None:
    members = Membership(4, 0)
    for op in range(3):
        members.contribution.observe({2}, op)
    members.bye(1)
    members.heard(2, 5)
    assert (members.live, members.owners, members.dead(9)) == ([3], [2, 3], {2})
    for rank in (1, 2):
        members.back(rank, 9)
    assert (members.live, members.owners, members.here, members.dead(10)) == ([1, 2, 3], [1, 2, 3], [1, 2, 3], set())
    members.bye(3)  # as many have gone as once before
    assert members.live == [1, 2]


def test_a_death_makes_a_suspect_until_rows_come() -> None:
    members = Membership(4, 0)
    assert members.contribution.accuse(2, 77)
    assert not members.contribution.accuse(2, 78)
    assert (members.live, members.contribution.first_missed(2)) == ([1, 3], 77)
    members.contribution.observe((), 79)
    assert members.live == [1, 2, 3]


GREETING = Greeting(1, 2, 1, "1", "10.0.0.1", 4000, 64, 128, 128, "udp", "m", {}, 0, 5000)


def test_the_store_tells_whether_a_job_is_under_way() -> None:
    store = MemoryStore()
    assert rendezvous.under_way(store, 1, 2, "job") is None
    for rank in range(2):
        store.set(f"job/greeting/{rank}", json.dumps(vars(GREETING) | {"rank": rank, "cookie": 9}))
    with pytest.raises(TransportError, match="before its job had begun"):
        rendezvous.under_way(store, 1, 2, "job")
    rendezvous.begin(store, "job")
    texts = rendezvous.under_way(store, 1, 2, "job")
    assert texts is not None
    assert [g.cookie for g in rendezvous.come_back(GREETING, texts)] == [9, 9]
    moved = Greeting(**(vars(GREETING) | {"address": "10.0.0.2"}))
    with pytest.raises(LayoutError, match=r"address '10.0.0.2' and had '10.0.0.1'"):
        rendezvous.come_back(moved, texts)


@pytest.mark.parametrize("farewell", [True, False])
def test_a_connection_that_ends_without_a_farewell_is_a_death(*, farewell: bool) -> None:
    said: queue.Queue[int] = queue.Queue()
    here, there = Lifelines(said.put), Lifelines(said.put)
    ends = [socket.socketpair() for _ in range(2)]
    here.hold(3, ends[0][0])
    here.hold(5, ends[1][0])
    if farewell:
        there.hold(0, ends[0][1])
        there.close()
    else:
        ends[0][1].close()
    ends[1][1].close()  # after it, so that both have been looked at
    heard = {said.get(timeout=30) for _ in range(1 if farewell else 2)}
    here.close()
    here.close()
    assert heard == ({5} if farewell else {3, 5})
    assert said.empty()
