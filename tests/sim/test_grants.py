"""A grant goes out, is obeyed and ends (clock-24)."""

from __future__ import annotations

from sim.team import sim_team
from support import gradients, hasty

RANKS = 4
NUMEL = 64 * 64


def test_a_receiver_that_has_recovered_frees_its_senders() -> None:
    with sim_team(RANKS, hasty(width=64, ring_mib=1.0)) as job:
        senders = job.communicators[1:]

        def ops(count: int) -> set[float]:
            for op in range(count):
                job.allreduce(gradients("U", RANKS, NUMEL, seed=op))
            return {member.stats()["traffic"]["grants"]["0"] for member in senders}

        assert ops(4) == {1.0}
        job[0].job.flow.incast.taken = 1.0
        assert ops(4) == {1 / 3}
        assert ops(80) == {1.0}
        assert not any(member.job.flow.queue.pacer.limited for member in senders)
