"""Op labels, places in the rings, predictions (clock-2, clock-18, clock-19); in step, behind, lost (clock-20)."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

import pytest

from tailbound.codec.owners import OwnerMap
from tailbound.codec.shape import shape_for
from tailbound.errors import TransportError
from tailbound.transport.sequence import Layout, Place, Position, Sequence
from tailbound.transport.steps import Steps, step_distance
from tailbound.wire.schema import OP_STEPS, op_label, serial_distance

RANKS = 3
Maps = Collection[tuple[int, OwnerMap]]
MAP = OwnerMap(0, (0, 1, 2))
HALF = 1 << 21


def layout(size: int, *, index: int = 0, last: bool = False) -> Layout:
    return Layout((index, size, 0, 1), shape_for(size, 256), 7 * size & 0xFFFF, last)


def step(*sizes: int) -> list[Layout]:
    return [layout(size, index=i, last=i == len(sizes) - 1) for i, size in enumerate(sizes)]


def launch(sequence: Sequence, layouts: Iterable[Layout]) -> list[Place]:
    placed = []
    for each in layouts:
        place, wrong = sequence.assign(each)
        assert wrong == []
        placed.append(place)
    return placed


def fresh(maps: Maps = (), history: Iterable[Layout] = ()) -> tuple[Sequence, list[Place]]:
    """A rank that knows ``maps`` from the beginning, and where it has placed ``history``."""
    sequence = Sequence(RANKS, MAP)
    if maps:
        sequence.set_maps(maps)
    return sequence, launch(sequence, history)


def test_labels_count_ops_and_rows_follow_each_other_in_every_ring() -> None:
    sequence, places = fresh(history=step(1000, 70_000) + step(5, 300_000))
    assert [p.label for p in places] == [op_label(0, 0), op_label(0, 1), op_label(1, 0), op_label(1, 1)]
    assert [p.previous for p in places] == [0xFFFFFFFF, *(p.label for p in places[:-1])]
    assert sequence.next_label == sequence.upcoming == op_label(2, 0)
    assert fresh(history=step(1000, 5)[:1])[0].upcoming == op_label(0, 1)
    assert (places[0].result_seq, places[0].sum_seqs) == (0, (0, 0, 0))
    for a, b in itertools.pairwise(places):
        assert b.result_seq == a.result_seq + a.layout.shape.rows
        for rank in range(RANKS):
            assert b.sum_seqs[rank] == a.sum_seqs[rank] + a.placement.counts[rank]


@pytest.mark.parametrize("first", [0, (1 << 22) - 2, 0xFFFFFF00 >> 10])
def test_labels_and_sequences_wrap(first: int) -> None:
    sequence, rows = Sequence(RANKS, MAP, first), 6 * sum(x.shape.rows for x in step(50_000, 3000))
    sequence.jump(Position(first, 0xFFFFFF00, (0xFFFFFFF0,) * RANKS, ((0, MAP),)))
    places = launch(sequence, step(50_000, 3000) * 6)
    assert [p.label for p in places] == [op_label((first + s) % (1 << 22), i) for s in range(6) for i in range(2)]
    for place in places:
        assert serial_distance(place.previous, place.label) < 0
        assert all(0 <= seq <= 0xFFFFFFFF for seq in (place.result_seq, *place.sum_seqs))
    assert launch(sequence, step(1))[0].result_seq == (0xFFFFFF00 + rows) & 0xFFFFFFFF


def test_predictions_need_two_equal_steps() -> None:
    sequence = Sequence(RANKS, MAP)
    assert not sequence.adrift
    for size in (2000, 3000):
        assert (sequence.predict(), sequence.op_rows) == (None, ())
        launch(sequence, step(1000, size))
    assert sequence.predict() is None
    launch(sequence, step(1000, 3000))
    assert sequence.stable
    assert sequence.op_rows == tuple(each.shape.rows for each in step(1000, 3000))
    assert sequence.predict() is not None
    other, _ = fresh(history=[*step(1000, 2000) * 2, layout(500, index=0)])
    assert other.predict() is None  # its step has gone another way


@pytest.mark.parametrize(("ahead", "right"), [(1, 0), (3, 0), (20, 0), (2, 1), (20, 1)])
def test_a_wrong_prediction_is_undone(ahead: int, right: int) -> None:
    """What follows has the places of a rank that never predicted anything."""
    old, new = step(1000, 2000), [*step(1000, 2000)[:right], *step(1000, 7000)[right:]]
    new = new if right == 1 else step(640, 7000)
    (sequence, _), (plain, _) = fresh(history=old * 2), fresh(history=old * 2)
    predicted = [sequence.predict() for _ in range(ahead)]
    got, undone = [], []
    for each in new * 3:
        place, wrong = sequence.assign(each)
        got.append(place)
        undone += wrong
    assert (got, undone) == (launch(plain, new * 3), predicted[right:])
    assert sequence.predict() is not None  # two equal steps again


def test_an_op_that_lies_elsewhere_has_another_tag() -> None:
    """Behind a step foreseen too short, a late rank sealed and published its next op at its own place: clock-18."""
    (late, _), (plain, _) = fresh(history=step(1000, 2000) * 2), fresh(history=step(1000, 2000) * 2)
    *_, foreseen = (late.predict() for _ in range(3))
    *_, right = launch(plain, [*step(1000, 2000, 3000), layout(1000)])
    assert foreseen is not None
    assert (foreseen.label, foreseen.layout) == (right.label, right.layout)
    assert foreseen.tag != right.tag


def test_a_step_has_at_most_1024_ops() -> None:
    sequence, _ = fresh(history=[layout(100, index=i) for i in range(1024)])
    with pytest.raises(ValueError, match="larger buckets"):
        sequence.assign(layout(100))


@pytest.mark.parametrize("launched", [2, 3, 5, 6, 9, 13])
def test_a_map_told_late_puts_the_ops_to_come_where_the_others_have_them(launched: int) -> None:
    history = step(1000, 70_000) * 9
    maps = [(0, MAP), (1, OwnerMap(1, (2, 0))), (3, OwnerMap(513, (1, 1, 0)))]
    (told, places), (late, _) = fresh(maps, history), fresh(history=history[:launched])
    ahead = [place for _ in range(3) if (place := late.predict())]
    wrong = late.set_maps(maps)
    assert [p.placement.owner_map.id for p in ahead if p not in wrong] == [0] * (len(ahead) - len(wrong))
    assert launch(late, history[launched:]) == places[launched:]
    assert late.position() == told.position()


def test_a_map_that_was_not_agreed_on_after_all_is_taken_back() -> None:
    history = step(1000, 70_000) * 4
    one, _ = fresh([(0, MAP), (1, OwnerMap(256, (0,)))], history[:3])
    one.set_maps([(1, MAP)])
    assert launch(one, history[3:]) == fresh(history=history)[1][3:]
    assert Sequence(RANKS, MAP, 5).map_at(4) == MAP  # before the first one that is known it was no other


def test_steps_before_a_change_stay_where_they_are_although_their_map_is_not_named_any_more() -> None:
    maps = [(0, MAP), (4, OwnerMap(257, (2, 0))), (5, OwnerMap(513, (1, 1, 0))), (6, OwnerMap(769, (0,)))]
    (_, places), (late, _) = fresh(maps, step(70_000) * 10), fresh(maps[:3], step(70_000) * 9)
    before = late.sum_seqs
    assert (late.set_maps(maps[1:3]), late.sum_seqs, late.adrift) == ([], before, False)
    late.set_maps(maps[1:])
    assert launch(late, step(70_000)) == places[9:]


@pytest.mark.parametrize("predicted", [0, 1, 9])
@pytest.mark.parametrize(
    ("jumps", "since", "launched", "known"),
    [
        # where the last eight of twelve steps began is remembered
        *((False, 4, 0, True), (False, 3, 0, False), (False, 2, 0, False)),
        # who jumped knows nothing of what lies before; who told it had not heard of the map either
        *((True, 12, 0, True), (True, 11, 0, False), (True, 12, 1, True), (True, 11, 1, False)),
    ],
)
def test_a_map_that_began_before_what_is_remembered_asks_for_a_jump(
    jumps: bool, since: int, launched: int, known: bool, predicted: int
) -> None:
    """Predictions made meanwhile are forgotten in any case: the window would keep ops at wrong places."""
    maps = [(0, MAP), (since, OwnerMap(257, (2, 0)))]
    (told, places), (late, _) = fresh(maps, step(70_000) * 15), fresh(history=step(70_000) * 12)
    if jumps:
        donor, late = late, fresh()[0]
        late.jump(donor.position())
    launch(late, step(70_000) * launched)
    ahead = [place for _ in range(predicted) if (place := late.predict())]
    assert len(ahead) == predicted or jumps
    assert late.set_maps(maps) == ahead
    assert late.adrift != known
    assert (launch(late, step(70_000))[0].sum_seqs == places[12 + launched].sum_seqs) == known
    late.jump(told.position())
    assert not late.adrift
    assert launch(late, step(70_000) * 2)[1:] == launch(told, step(70_000) * 2)[1:]


def test_a_gap_in_the_history_of_maps_asks_for_a_jump() -> None:
    late, _ = fresh([(20, OwnerMap(513, (1,))), (30, OwnerMap(769, (0,)))])
    assert late.adrift
    with pytest.raises(TransportError, match="ask another"):
        late.position()  # it would lead others astray


@pytest.mark.parametrize("steps", [4, 5])
def test_who_is_behind_and_is_told_no_map_of_its_step_jumps(steps: int) -> None:
    """It placed rows by the oldest that it was told, where no other rank has them, and all skipped every step."""
    later = [(5, OwnerMap(257, (2, 0))), (8, OwnerMap(513, (1,)))]
    late, _ = fresh([(0, MAP), later[0]], step(70_000) * steps)
    late.set_maps(later)
    assert late.adrift == (steps < 5)


def test_a_map_turned_within_wrong_predictions_turns_again() -> None:
    sequence, _ = fresh(history=step(100, 7) * 2)
    sequence.set_maps([(0, MAP), (3, OwnerMap(257, (1,)))])
    ahead = [sequence.predict() for _ in range(3)]
    assert [p.placement.owner_map.id for p in ahead if p] == [0, 0, 257]
    placed = [sequence.assign(layout(99, last=True)) for _ in range(2)]
    assert [(at.step, at.placement.owner_map.id, len(wrong)) for at, wrong in placed] == [(2, 0, 3), (3, 257, 0)]


@pytest.mark.parametrize("first", [0, (1 << 22) - 9])
@pytest.mark.parametrize("foreseen", [0, 1, 4])
@pytest.mark.parametrize("launched", [0, 1, 2, 3])
def test_a_rank_that_jumps_meets_the_others(launched: int, foreseen: int, first: int) -> None:
    """Also where the layout changes in that step: rows of its last ops were foretold. Rules: clock-20, clock-32."""
    history, other = step(100, 7, 3000), step(100, 7, 70_000)
    donor, lost = Sequence(RANKS, MAP, first), fresh(history=history * 2)[0]
    launch(donor, history * 9 + history[:launched])
    for _ in range(foreseen):
        assert donor.predict() is not None
        assert lost.predict() is not None
    lost.jump(donor.position())
    assert lost.upcoming == op_label((first + 9 + launched // 3) % (1 << 22), 0)
    places = [donor.assign(each)[0] for each in other[launched % 3 :] + other]
    found = launch(lost, other * 2)
    assert found[0].previous == (found[0].label - 1) & 0xFFFFFFFF  # which nobody has
    assert found[-4:] == places[-4:]


def standing(own: int, newest: int, *, rows: tuple[int, ...] = (), ring: int = 1000, first: int = 0) -> Steps:
    """Own next op ``first`` of step ``own``; the newest of the others is in the fourth op of its step."""
    return Steps(op_label(own, first), op_label(newest, 3), rows, ring)


@pytest.mark.parametrize(
    ("standing", "behind", "lost"),
    [
        *((standing(7, newest), 0, False) for newest in (7, 6)),
        (standing(7, 9), 2, False),
        # the ring cannot hold what lies between: nine ops of it, up to the one that they are in
        (standing(7, 8, rows=(100,) * 5), 1, False),
        (standing(7, 8, rows=(111,) * 5), 1, False),
        (standing(7, 8, rows=(112,) * 5), 1, True),
        (standing(7, 9, rows=(100,) * 5), 2, True),
        (standing(7, 9, rows=(71,) * 5), 2, False),
        (standing(7, 9, rows=(100,) * 5, first=4), 2, False),
        # a step that is larger than the ring goes through it op by op: only a rank a step behind cannot have all of it
        *((standing(7, 7, rows=rows), 0, False) for rows in ((2000,), (400,) * 5)),
        *((standing(7, 8, rows=rows), 1, True) for rows in ((2000,), (400,) * 5)),
        # the records are gone and no step is known
        (standing(7, 7 + OP_STEPS - 1), OP_STEPS - 1, False),
        (standing(7, 7 + OP_STEPS), OP_STEPS, True),
        (standing(7, 7 + OP_STEPS, rows=(1,)), OP_STEPS, False),
    ],
)
def test_who_is_in_step_behind_or_lost(standing: Steps, behind: int, lost: bool) -> None:
    assert (standing.own, standing.behind, standing.lost) == (7, behind, lost)


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [(0, 0x3FFFFF, 1), (0x3FFFFF, 0, -1), (5, 3, 2), (0x3FFFFE, 2, -4), (HALF - 1, 0, HALF - 1), (HALF, 0, -HALF)],
)
def test_steps_are_serial_numbers(a: int, b: int, distance: int) -> None:
    assert step_distance(a, b) == distance
    assert standing(b, a).behind == max(0, distance)
    assert Steps(op_label(b, 1023), op_label(a, 0), (), 1000).behind == max(0, distance)  # the next op may be a step on
