"""What a rank knows (``collective.known``): a session that stays as it is, and what the datapath has written of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tailbound.collective.known import Known
from tailbound.datapath.store import allocate, store_of
from tailbound.transport.config import Config
from tailbound.transport.switch import Switch
from tailbound.wire.schema import UNKNOWN_SENDER, Verdict, op_label, op_slot

COOKIE, STEP = 7, 9
LABEL = op_label(STEP, 0)


def known(**more: Any) -> Known:
    """Rank 1 of three."""
    return Known(Config(rank=1, ranks=3, **more), COOKIE, store_of(allocate(64, 64, 64)), 0)


def test_a_switch_is_a_rank_that_owns_and_does_not_contribute() -> None:
    one, switched = known(), known(switch=Switch("10.0.0.1"))
    assert (one.peers, one.world, one.switch) == ([2, 0], 3, None)
    assert (switched.peers, switched.world, switched.switch) == ([2, 0], 4, 3)
    assert one.owners((0, 2), switched=True) == (0, 2)
    assert switched.owners((0, 2), switched=True) == (3,)
    assert switched.owners((0, 2), switched=False) == (0, 2)


def test_records_of_another_job_or_op_are_none() -> None:
    one = known()
    record, state = one.store.ops[op_slot(LABEL)], one.store.peer_states[2]
    record["op"], state["contributed"], state["published"], state["last_ns"] = LABEL, LABEL, LABEL - 1, 50
    state["newest"], state["deadline"] = LABEL, 100
    for cookie, ours in ((COOKIE ^ 1, False), (COOKIE, True)):
        record["cookie"] = state["cookie"] = cookie
        assert (one.records.of(LABEL) is not None) == ours
        assert one.records.contributed(2, LABEL) == ours
        assert not one.records.published(2, LABEL)
        assert one.records.published(2, LABEL - 1) == ours
        assert max(one.heard(0), one.heard(2)) == 50 * ours
        assert one.records.deadlines([0, 2], STEP) == [6_400_000] * ours
    assert one.records.of(LABEL + 1) is None
    assert one.records.deadlines([2], STEP + 2) == [6_400_000]
    assert one.records.deadlines([2], STEP + 3) == []  # not heard in the last two steps (clock-6)


def test_verdicts_count_from_the_begin_of_the_job() -> None:
    one = known()
    ledger = one.store.ledger["verdict"]
    ledger[2, Verdict.ADDED], ledger[UNKNOWN_SENDER, Verdict.NOT_LINEAR] = 5, 3
    one.records.reset()
    ledger[2, Verdict.ADDED] += np.uint64(2)
    ledger[UNKNOWN_SENDER, Verdict.NOT_LINEAR] += np.uint64(1)
    assert one.records.verdicts()[2, Verdict.ADDED] == 2
    assert one.records.verdicts([2, UNKNOWN_SENDER]).sum(axis=1).tolist() == [2, 1]
    assert one.records.not_linear() == 1
