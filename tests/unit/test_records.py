"""What the datapath has written of a job, and not of another one (``collective.records``)."""

from __future__ import annotations

from tailbound.collective.records import Records
from tailbound.datapath.protocol import allocate, store_of
from tailbound.wire.schema import op_label, op_slot

COOKIE, LABEL = 7, op_label(9, 0)


def test_records_of_another_job_or_op_are_none() -> None:
    store = store_of(allocate(64, 64, 64))
    records, record, state = Records(store, COOKIE), store.ops[op_slot(LABEL)], store.peer_states[2]
    record["op"], state["contributed"], state["published"] = LABEL, LABEL, LABEL - 1
    for cookie, ours in ((COOKIE ^ 1, False), (COOKIE, True)):
        record["cookie"] = state["cookie"] = cookie
        assert (records.of(LABEL) is not None) == ours
        assert records.all_contributed([2], LABEL) == [2] * ours
        assert not records.all_published([2], LABEL)
        assert records.all_published([2], LABEL - 1) == [2] * ours
    assert records.of(LABEL + 1) is None
