"""Who should own how many rows: lateness, speeds, and the policy over them (clock-22)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailbound.transport.shares import FULL, Lateness, Observation, Shares, Speeds, levels

MS = 1_000_000


def seen(
    lateness: dict[int, int] | None = None, *, pace: int = 20, absent: set[int] | None = None, **speeds: float
) -> Observation:
    """An observation in ms; speeds as ``r3=0.2``."""
    by_rank = {int(name[1:]): speed for name, speed in speeds.items()}
    return Observation({r: ms * MS for r, ms in (lateness or {}).items()}, absent or set(), by_rank, pace * MS)


def steps_until(shares: Shares, observation: Observation, wanted: tuple[int, ...], most: int = 2000) -> int:
    for step in itertools.count(1):
        if shares.observe(observation) == wanted:
            return step
        assert step < most, shares.weights
    raise AssertionError


# -- measuring ----------------------------------------------------------------------------------------------------


def lateness_of(launches: list[int], rank: int) -> int:
    late = Lateness()
    for _ in range(16):
        late.observe(launches[rank], [t for r, t in enumerate(launches) if r != rank])
    return late.value


@pytest.mark.parametrize(
    ("launches", "late"),
    [
        ([0, 50], [1]),
        ([50, 0, 0], [0]),
        ([0, 0, 50, 0], [2]),
        ([50, 0, 0, 60], [0, 3]),
        ([0, 50, 0, 70, 0, 60, 0, 90], [1, 3, 5, 7]),
        ([0, 50, 60], []),  # of three ranks two that come together are no stragglers
        ([0, 50, 100], [2]),
        ([0, 0, 0, 0], []),
    ],
)
def test_the_late_ones_see_themselves_and_nobody_else(launches: list[int], late: list[int]) -> None:
    assert [r for r in range(len(launches)) if lateness_of(launches, r) > 25] == late


@pytest.mark.parametrize(("ops", "value"), [(7, 0), (8, 10)])
def test_lateness_needs_half_a_window(ops: int, value: int) -> None:
    late = Lateness()
    for _ in range(ops):
        late.observe(10, [0, 0])
    late.observe(5, [])  # nobody else was there
    assert late.value == value


@pytest.mark.parametrize(("in_time", "value"), [(0, 10), (2, 10), (3, 0)])
def test_who_is_in_time_in_three_of_sixteen_ops_is_not_late(in_time: int, value: int) -> None:
    late = Lateness()
    for op in range(16):
        late.observe(0 if op < in_time else 10 if op < 12 else 900, [0, 0])
    assert late.value == value
    for _ in range(3):
        late.observe(0, [7])
    assert late.value == 0


@pytest.mark.parametrize(("ops", "speeds"), [(15, {}), (16, {1: 1.0, 2: 0.5})])
def test_of_two_peers_one_is_as_fast_as_the_other_or_slower(ops: int, speeds: dict[int, float]) -> None:
    measured = Speeds()
    measured.observe({}, 100)
    for i in range(ops):
        measured.observe({1: 4 * MS, 2: 2 * MS if i < 4 else 8 * MS}, 100)
        measured.observe({1: 2 * MS}, 1000)  # compared with nobody
    assert measured.values() == pytest.approx(speeds)


def test_a_slow_link_is_seen_through_disturbances() -> None:
    speeds = Speeds()
    for i in range(32):
        noise = 9 * MS if i % 3 else 0
        speeds.observe({1: 10 * MS, 2: 40 * MS, 3: 10 * MS + noise}, 100)
        speeds.observe({1: MS, 2: MS, 3: 90 * MS}, 100)  # too short to say anything
    assert speeds.values() == pytest.approx({1: 1.0, 2: 0.25, 3: 1.0})


# -- the policy ---------------------------------------------------------------------------------------------------


def test_a_straggler_goes_after_some_steps_and_comes_back_after_more() -> None:
    shares = Shares(4)
    gone = steps_until(shares, seen({2: 50}), (1, 1, 0, 1))
    back = steps_until(shares, seen({2: 1}), (1, 1, 1, 1))
    assert (gone, back) == (4, 8)


def test_a_slow_link_is_believed_later_than_a_late_rank() -> None:
    assert Shares(4).weights == (1, 1, 1, 1)
    assert steps_until(Shares(4), seen({3: 5}, r3=0.3), (1, 1, 1, 0)) == 32


@pytest.mark.parametrize(("steps", "again"), [(126, 16), (127, 8)])
def test_who_goes_soon_after_its_return_has_returned_too_early(steps: int, again: int) -> None:
    shares = Shares(4)
    shares.observe(seen(absent={1}))
    assert steps_until(shares, seen(), (1, 1, 1, 1)) == 8
    for _ in range(steps):
        shares.observe(seen())
    assert shares.observe(seen(absent={1})) == (1, 0, 1, 1)
    assert steps_until(shares, seen(), (1, 1, 1, 1)) == again


@pytest.mark.parametrize("lateness", [{1: 5}, {1: 4, 2: 400}, {1: 100, 2: 400}])
def test_who_is_hardly_late_stays(lateness: dict[int, int]) -> None:
    shares = Shares(4)
    for _ in range(50):
        assert shares.observe(seen(lateness))[1]


def test_of_two_ranks_none_goes_for_being_late() -> None:
    """All rows with one rank would double what it has to do, and send as many bytes one after the other."""
    shares = Shares(2)
    for _ in range(50):
        assert shares.observe(seen({0: 500}, pace=400)) == (1, 1)
    assert steps_until(shares, seen({}, absent={0}), (0, 1)) == 1


def test_lateness_is_measured_against_the_pace_of_an_op() -> None:
    slow, fast, just = Shares(4), Shares(4), Shares(4)
    for _ in range(50):
        just.observe(seen({1: 10}, pace=40))
        slow.observe(seen({1: 30}, pace=200))
        fast.observe(seen({1: 30}, pace=20))
    assert slow.weights == (1, 1, 1, 1)
    assert just.weights == (1, 1, 1, 1)
    assert fast.weights == (1, 0, 1, 1)
    assert steps_until(fast, seen({1: 5}, pace=40), (1, 1, 1, 1)) == 8


def test_between_the_limits_nothing_moves() -> None:
    shares = Shares(4)
    for _ in range(50):
        assert shares.observe(seen({1: 4})) == (1, 1, 1, 1)
    steps_until(shares, seen({1: 50}), (1, 0, 1, 1))
    for _ in range(50):
        assert shares.observe(seen({1: 4})) == (1, 0, 1, 1)


def test_who_goes_again_and_again_is_let_in_ever_later() -> None:
    shares, times = Shares(4), []
    for _ in range(12):
        steps_until(shares, seen({1: 50}), (1, 0, 1, 1))
        times.append(steps_until(shares, seen({}), (1, 1, 1, 1)))
    assert times == [8, 16, 32, 64, 128, 256] + [512] * 6
    for _ in range(200):
        shares.observe(seen({}))
    steps_until(shares, seen({1: 50}), (1, 0, 1, 1))
    assert steps_until(shares, seen({}), (1, 1, 1, 1)) == times[0]


def test_suspects_and_the_dead_go_at_once() -> None:
    shares = Shares(4)
    assert shares.observe(seen(absent={3})) == (1, 1, 1, 0)
    assert shares.observe(seen(absent={3, 1})) == (1, 0, 1, 0)
    steps_until(shares, seen(), (1, 1, 1, 1))


@pytest.mark.parametrize(
    ("lateness", "absent", "weights"),
    [
        ((0, 50, 90), (), (1, 1, 0)),
        ((0, 50, 90), (0,), (0, 1, 1)),
        ((0, 0, 90), (0, 1), (0, 0, 1)),
        ((0, 60, 50, 90), (), (1, 0, 1, 0)),
        ((0, 50, 60, 70, 80), (), (1, 1, 1, 0, 0)),
    ],
)
def test_half_of_those_that_are_there_own_rows_and_two_at_least(
    lateness: tuple[int, ...], absent: tuple[int, ...], weights: tuple[int, ...]
) -> None:
    """Rows of a single owner are lost together. Rule: clock-22."""
    shares = Shares(len(lateness))
    for _ in range(20):
        shares.observe(seen(dict(enumerate(lateness)), absent=set(absent)))
    assert shares.weights == weights


def test_who_owns_rows_though_late_is_not_changed_for_who_is_a_little_less_late() -> None:
    shares = Shares(3)
    steps_until(shares, seen({1: 50, 2: 60}), (1, 1, 0))
    for step in range(50):
        assert shares.observe(seen({1: 50 + step % 3, 2: 51})) == (1, 1, 0)


def test_there_is_always_an_owner_and_no_rank_that_is_there_gives_way_to_one_that_is_not() -> None:
    shares = Shares(3)
    for _ in range(20):
        weights = shares.observe(seen({0: 90, 1: 50}, absent={2}))
    assert weights == (1, 1, 0)
    for _ in range(20):
        weights = shares.observe(seen(absent={0, 1, 2}))
    assert any(weights)
    assert Shares(3).observe(seen({2: 0}, absent={0, 1, 2})) == (1, 0, 0)  # of who has said nothing, nothing is known


def test_nobody_owns_more_than_there_is_room_for() -> None:
    shares = Shares(4, share_most=0.5)
    for _ in range(20):
        weights = shares.observe(seen({0: 90, 1: 80, 2: 70}))
    assert weights == (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("share_most", "levels", "weights"),
    [(0.5, (4, 2, 2), (4, 2, 2)), (0.5, (4, 1, 1), (1, 1, 1)), (0.6, (0, 0, 3), (1, 0, 1))],
)
def test_a_share_may_be_as_large_as_there_is_room_for(
    share_most: float, levels: tuple[int, ...], weights: tuple[int, ...]
) -> None:
    shares = Shares(3, share_most)
    for state, level in zip(shares._ranks, levels, strict=True):
        state.level = level
    assert shares.observe(seen()) == weights


@given(
    st.integers(2, 8),
    st.floats(0.13, 1.0),
    st.lists(
        st.tuples(
            st.dictionaries(st.integers(0, 7), st.integers(0, 200)),
            st.sets(st.integers(0, 7)),
            st.dictionaries(st.integers(0, 7), st.floats(0.01, 1.0)),
            st.integers(1, 12),
        ),
        min_size=1,
        max_size=8,
    ),
)
@settings(max_examples=60)
def test_whatever_is_seen_the_weights_are_a_map(ranks: int, most: float, history: list) -> None:  # type: ignore[type-arg]
    shares = Shares(ranks, max(most, 1 / ranks))
    for lateness, absent, speeds, times in history:
        for _ in range(times):
            observation = Observation(
                {r: ms * MS for r, ms in lateness.items() if r < ranks}, {r for r in absent if r < ranks},
                {r: v for r, v in speeds.items() if r < ranks}, 10 * MS,
            )  # fmt: skip
            weights = shares.observe(observation)
            assert len(weights) == ranks
            assert all(0 <= w <= FULL for w in weights)
            assert sum(w > 0 for w in weights) >= min(2, ranks - len(observation.absent))
            assert any(weights)
            assert max(weights) / sum(weights) <= max(most, 1 / ranks) + 1e-9


# -- slow links ---------------------------------------------------------------------------------------------------


def test_links_of_equal_speed_own_the_same() -> None:
    assert levels({0: 1.0, 1: 0.8, 2: 0.76}, 4) == {0: FULL, 1: FULL, 2: FULL}
    assert levels({1: 0.1}, 2) == {1: FULL}
    assert levels({}, 8) == {}
    assert levels({0: 0.75, 1: 0.3}, 4) == {0: FULL, 1: 0}


@pytest.mark.parametrize("ranks", [3, 4, 8])
@pytest.mark.parametrize("also", [(), (0.6,), (0.74, 0.7)])
def test_shares_are_such_that_every_link_takes_as_long(ranks: int, also: tuple[float, ...]) -> None:
    """As long as all own something, c is what makes the sum of (c v - 1) / (N - 2) one."""
    checked = 0
    for v in range(1, 75):
        slow = [v / 100, *also]
        c = (2 * ranks - 2) / (sum(slow) + ranks - len(slow))
        shares = [c * v - 1 for v in slow]
        if min(shares) < 0:
            continue
        top = max(*shares, c - 1 if ranks > len(slow) else 0)
        whole = [FULL * s / top for s in shares]
        if all(abs(w % 1 - 0.5) > 1e-9 for w in whole):
            assert levels(dict(enumerate(slow)), ranks) == {r: round(w) for r, w in enumerate(whole)}, slow
            checked += 1
    assert checked > 5


def test_shares_add_up_where_no_link_is_as_fast_as_its_own_best() -> None:
    assert levels({**dict.fromkeys(range(7), 0.6), 7: 0.74}, 8) == {**dict.fromkeys(range(7), 3), 7: FULL}


def test_a_slow_link_gets_a_smaller_share_and_all_of_it_back() -> None:
    shares = Shares(4)
    less = levels({3: 0.7}, 4)[3]
    assert 0 < less < FULL
    steps_until(shares, seen(r3=0.7), (FULL, FULL, FULL, less))
    steps_until(shares, seen(r3=0.3), (1, 1, 1, 0))
    steps_until(shares, seen(r3=1.0), (1, 1, 1, 1))
