"""Where a small mistake would otherwise pass unseen (``make mutants``): of ranks, maps, answers and senders."""

from __future__ import annotations

from tailbound.codec.owners import OwnerMap
from tailbound.codec.shape import shape_for
from tailbound.transport.membership import Membership
from tailbound.transport.sequence import Layout, Sequence
from tailbound.transport.steps import OLD, STEP_MASK, step_distance, step_of
from tailbound.wire.schema import op_label


def test_who_is_silent_stays_dead_and_a_goodbye_is_forgotten_however_many_steps_pass() -> None:
    """Steps wrap."""
    who, goodbye = Membership(ranks=4, rank=1), op_label(5, 0)
    who.back(0, 6)
    who.heard(2, 5)
    who.contribution.accuse(2, goodbye)
    who.bye(3, goodbye)
    assert who.left == {3: goodbye}
    for step in range(7, 2 * STEP_MASK, OLD):
        who.age(step & STEP_MASK)
        assert who.dead(step & STEP_MASK) == {2}
        assert who.alive(step & STEP_MASK) == [0]
        assert 0 < step_distance(step & STEP_MASK, step_of(who.contribution.first_missed[2])) <= 2 * OLD
        assert bool(who.left) == (step < OLD)
    who.bye(0, op_label(step & STEP_MASK, 0))
    assert 0 in who.gone, "it came back long ago"


def test_rows_that_a_process_sent_before_its_end_do_not_bring_it_back() -> None:
    """Two steps after all that it has named, rows are of a new process."""
    who = Membership(ranks=4, rank=1)
    who.heard(2, 6)
    for half in (who.contribution, who.result):
        half.accuse(2, op_label(3, 0))
    assert not who.died(2, op_label(5, 0))
    for step, dead in ((7, True), (8, False)):
        for half in (who.contribution, who.result):
            half.absent({3}, op_label(step, 0))
            assert half.suspected(2) == dead


def test_maps_that_were_known_or_are_older_change_no_place() -> None:
    first, second, third = (0, OwnerMap(0, (0, 1, 2))), (1, OwnerMap(257, (2, 0))), (99, OwnerMap(513, (1,)))
    sequence = Sequence(3, first[1])
    sequence.set_maps([first, second])
    for _ in range(30):
        sequence.assign(Layout((0, 1000, 0, 1), shape_for(1000, 256), 7, True))
    places = sequence.sum_seqs
    for maps in ([first, second], [second], [first, second, third]):
        assert sequence.set_maps(maps) == []
        assert (sequence.adrift, sequence.sum_seqs) == (False, places)
        assert sequence.newest_map == maps[-1][1].id
