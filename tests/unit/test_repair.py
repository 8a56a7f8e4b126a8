"""What is asked for, when, and what is spent on answers: the pure parts of repair, with the time as a number.

Rule: clock-23.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailbound.collective.repair import (
    PATIENCE_MOST,
    SHARE,
    Budget,
    Request,
    Requests,
    decode_repair,
    encode_repair,
    patience,
)
from tailbound.transport.config import FLOOR, MS
from tailbound.wire.packets import header as make_header
from tailbound.wire.packets import packet, parse
from tailbound.wire.schema import PacketType


def test_patience_follows_what_results_take() -> None:
    assert [patience(d2 * MS, FLOOR) for d2 in (0, 40, 100, 10_000)] == [FLOOR, FLOOR, 25 * MS, PATIENCE_MOST]


# -- answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pace", [1.25e7, 1.25e9])
def test_answers_take_their_share_of_the_pace_in_force(pace: float) -> None:
    budget, sent = Budget(10_000), 0
    assert budget.ready(5, pace) == 10_000
    budget.spend(10_000)
    for now in range(5, 10**9, 50_000):
        ready = budget.ready(now, pace)
        budget.spend(ready)
        sent += ready
    assert sent == pytest.approx(SHARE * pace, rel=0.01)


def test_when_the_budget_is_back() -> None:
    budget = Budget(10_000)
    budget.spend(10_000)
    wait = budget.enough_in(4000, 1e9)
    assert wait == pytest.approx(4000 / (SHARE * 1e9) * 1e9, abs=2)
    assert budget.ready(wait, 1e9) == 4000
    assert budget.enough_in(1 << 40, 1e9) <= 10_000 / (SHARE * 1e9) * 1e9 + 2  # never a wait without an end


def test_who_has_had_its_share_does_not_hold_the_others_up() -> None:
    requests = Requests()
    for label, asker in ((3, 1), (2, 2), (1, 1)):
        requests.add(_request(label, asker))
    found = [requests.newest(held) for held in ((), {1}, {2}, {1, 2})]
    assert [request and (request.label, request.asker) for request in found] == [(3, 1), (2, 2), (3, 1), None]


def _request(label: int, asker: int = 1, places: tuple[int, ...] = (0,), *, first_half: bool = False) -> Request:
    return Request(label & 0xFFFFFFFF, asker, first_half, 7, np.array(places, np.int64))


def test_the_newest_op_is_answered_first_across_the_wrap() -> None:
    requests = Requests()
    for label in (-3, 2, -1, 1):
        requests.add(_request(label))
    order = []
    while (request := requests.newest()) is not None:
        order.append(request.label)
        requests.done(request, 1)
    assert order == [2, 1, 0xFFFFFFFF, 0xFFFFFFFD]


def test_a_request_again_adds_to_the_first() -> None:
    requests = Requests()
    requests.add(_request(1, places=(1, 5)))
    requests.add(_request(1, places=(2, 5)))
    requests.add(_request(1, asker=2, places=(9,)))
    assert len(requests) == 2
    request = requests.newest()
    assert request is not None
    assert request.places.tolist() == [1, 2, 5]
    requests.done(request, 2)
    assert request.places.tolist() == [5]
    assert len(requests) == 2


def test_requests_are_bounded_and_the_oldest_goes() -> None:
    requests = Requests(most=3)
    for label in (5, 1, 9, 7):
        requests.add(_request(label))
    assert len(requests) == 3
    left = []
    while (request := requests.newest()) is not None:
        left.append(request.label)
        requests.done(request, 1)
    assert left == [9, 7, 5]
    for asker in (1, 2, 3, 4):
        requests.add(_request(6, asker))
    assert [request.asker for request in requests._waiting.values()] == [2, 3, 4]  # of one op's, the first


def test_a_request_for_another_layout_takes_the_place_of_the_first() -> None:
    requests = Requests()
    requests.add(_request(1, places=(1, 5)))
    other = _request(1, places=(2,))
    other.layout += 1
    requests.add(other)
    request = requests.newest()
    assert request is not None
    assert request.places.tolist() == [2]


# -- bodies -------------------------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 65534), min_size=1, max_size=400), st.sampled_from([16, 256, 1408]))
def test_what_is_asked_comes_out(places: set[int], width: int) -> None:
    wanted = np.array(sorted(places), np.int64)
    found = []
    for row, body in encode_repair(wanted, width):
        assert 0 < len(body) <= width
        parsed = parse(packet(make_header(type=PacketType.REPAIR, row=row, rows=65535), body))  # pads with zeros
        assert parsed is not None
        part = decode_repair(parsed[1], int(parsed[0]["row"][0]), 65535)
        assert part is not None
        found += part.tolist()
    assert found == wanted.tolist()


def test_few_packets_for_many_rows() -> None:
    assert len(encode_repair(np.arange(20_000), 1408)) == 2
    assert encode_repair(np.zeros(0, np.int64), 1408) == []
    assert encode_repair(np.array([0, 7, 8 * 16]), 16) == [(0, bytes([0b10000001])), (128, bytes([0b10000000]))]
    assert decode_repair(bytes([0b10000000]), 5, 5) is None  # one beyond the last
    ((row, body),) = encode_repair(np.array([9, 11]), 1408)
    assert (row, body) == (9, bytes([0b10100000]))


@settings(max_examples=300)
@given(st.binary(max_size=1408), st.integers(0, 65535), st.integers(0, 65535))
def test_any_body_is_refused_or_within_the_list(body: bytes, row: int, rows: int) -> None:
    places = decode_repair(body, row, rows)
    if places is None:
        assert not any(body) or row + max(i for i in range(8 * len(body)) if body[i >> 3] << (i & 7) & 128) >= rows
    else:
        assert row <= places[0]
        assert places[-1] < rows
        assert (np.diff(places) > 0).all()
        assert len(places) == sum(byte.bit_count() for byte in body)
