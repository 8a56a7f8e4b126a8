"""A worker's own kernel program takes what the P4 switch sends as it takes any owner's result: no rule is new there."""

from __future__ import annotations

import pytest

import cases
import p4_world
import switch_cases
from kernel_world import KernelWorld
from switch_cases import JOB, Step, contribution
from tailbound.wire.address import words_of
from tailbound.wire.packets import parse
from tailbound.wire.schema import Flag, Verdict

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers", "p4c", "bmv2", "thrift")


@pytest.mark.parametrize("codes", [cases.CODES, 48, 16])
def test_sums_are_taken(world: p4_world.World, codes: int) -> None:
    place = {"seq": cases.RESULT_SEQ, "row": 3, "contributed": cases.OP - 1}
    sent = [contribution(rank, codes, **place) for rank in range(JOB.ranks)]
    with world.jobs([JOB]):
        for packet in sent:
            out = world.feed(packet[14], p4_world.frame_of(Step(packet, None), packet[14]))
    (data,) = out[cases.RANK]
    kernel = KernelWorld("bcc")
    kernel.begin(JOB.ranks + 1)
    try:
        kernel.store.peers[JOB.ranks] = (words_of(switch_cases.ADDRESS)[0], 1, 0, 0)
        assert kernel.judge(data) == (Verdict.RESULT_TAKEN, JOB.ranks)
        assert kernel.judge(data) == (Verdict.DUPLICATE_RESULT, JOB.ranks)
        head, body = parse(data[p4_world.HEADERS :])
        slot = cases.RESULT_SEQ % cases.RESULT_ROWS
        record = kernel.store.result_records[slot]
        assert kernel.store.results[slot, : 2 * codes].tobytes() == body
        assert (record["flags"], record["count"], record["owner"]) == (Flag.SUMS, JOB.ranks, JOB.ranks)
        assert (record["scale"], record["exponent"]) == (head["scale"][0], head["exponent"][0])
    finally:
        kernel.close()
