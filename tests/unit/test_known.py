"""What a rank knows (``collective.known``): a session that stays as it is, and what the datapath has written of it."""

from __future__ import annotations

from tailbound.collective.known import Known
from tailbound.datapath.protocol import allocate, store_of
from tailbound.transport.config import Config
from tailbound.wire.schema import op_label, op_slot

COOKIE, LABEL = 7, op_label(9, 0)


def test_records_of_another_job_or_op_are_none() -> None:
    one = Known(Config(rank=1, ranks=3), COOKIE, store_of(allocate(64, 64, 64)), 0)
    record, state = one.store.ops[op_slot(LABEL)], one.store.peer_states[2]
    record["op"], state["contributed"], state["published"] = LABEL, LABEL, LABEL - 1
    for cookie, ours in ((COOKIE ^ 1, False), (COOKIE, True)):
        record["cookie"] = state["cookie"] = cookie
        assert (one.records.of(LABEL) is not None) == ours
        assert one.records.all_contributed([2], LABEL) == [2] * ours
        assert not one.records.all_published([2], LABEL)
        assert one.records.all_published([2], LABEL - 1) == [2] * ours
    assert one.records.of(LABEL + 1) is None
