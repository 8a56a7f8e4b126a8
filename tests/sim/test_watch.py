"""Jobs in virtual time: the books are those of what was lost on purpose, safeguards bind all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.team import SimTeam, sim_team
from support import Trouble, balanced, exact_mean, gradients, nmse, patient
from tailbound.errors import TransportError
from tailbound.transport.safeguard import Limits
from tailbound.wire.schema import UNKNOWN_SENDER, PacketType, Verdict
from tailbound_lab.simulate.fabric import MS

WIDTH = 64
NUMEL = 8 * 64 * WIDTH
#: Nothing is repaired and rows stay where they are, so that every lost packet shows once, and where it was lost.
PLAIN: dict[str, Any] = {"width": WIDTH, "ring_mib": 1.0, "repair": False, "share_rows": False, "quiet": 50 * MS}


def check(job: SimTeam) -> None:
    """The books balance, and those of contributions agree with what the datapath has summed."""
    for member in job.communicators:
        stats = member.stats()
        for stage in stats["ledger"].values():
            assert all(balanced(entry) for entry in stage.values())
        assert stats["rows_summed"] == sum(e["taken"] for e in stats["ledger"]["contributions"].values())


@pytest.mark.parametrize(
    ("kind", "stage"), [(PacketType.CONTRIBUTION, "contributions"), (PacketType.RESULT, "results")]
)
def test_what_was_lost_on_purpose_is_booked_as_lost(kind: PacketType, stage: str) -> None:
    """Per sender and receiver, to the packet: two countings that know nothing of each other."""
    ranks = 3
    with sim_team(ranks, patient(**PLAIN)) as job:
        job.allreduce(gradients("U", ranks, NUMEL, seed=99))
        troubles = job.trouble(lambda: Trouble(7, loss=0.03, duplicate=0.03, types=frozenset({kind})))
        for op in range(6):
            for out, outcome in job.allreduce(gradients("U", ranks, NUMEL, seed=op)):
                assert outcome.error is None
                assert np.isfinite(out).all()
        check(job)
        lost = doubled = 0
        for rank, member in enumerate(job.communicators):
            for peer, entry in member.stats()["ledger"][stage].items():
                assert entry["lost"] == troubles[int(peer)].dropped.get((rank, kind), 0), (rank, peer)
                assert entry["absent"] == entry["refused"] == entry["late"] == 0
                assert entry["expected"] == entry["taken"] + entry["lost"]
                lost += entry["lost"]
                doubled += entry["duplicated"]
        assert lost > 20
        assert 20 < doubled <= sum(trouble.doubled for trouble in troubles)


def test_an_op_fails_where_all_frames_come_in_pieces() -> None:
    deaf = frozenset({PacketType.CONTRIBUTION, PacketType.RESULT})
    short = dict.fromkeys(("deadline_1", "deadline_2", "stage_max", "start_max"), 300 * MS)
    with sim_team(2, patient(**PLAIN | short)) as job:
        job[1].trouble(Trouble(3, loss=1.0, types=deaf))
        job[0].job.store.ledger["verdict"][UNKNOWN_SENDER, Verdict.NOT_LINEAR] += np.uint64(7)
        job[0].node.datapath.taken += 7
        (_, outcome), _ = job.allreduce(gradients("U", 2, NUMEL, seed=0))
        assert isinstance(outcome.error, TransportError)
        assert "in pieces" in str(outcome.error)
        assert job[0].stats()["event_counts"]["not_linear"] == 1


def test_an_owner_that_lost_too_much_makes_all_ranks_skip() -> None:
    """One rank hears nothing of the others' rows: all of them get zeros for this op, and go on with the next one."""
    ranks = 3
    with sim_team(ranks, patient(**PLAIN, safeguard=Limits(skip=0.5))) as job:
        job.allreduce(gradients("U", ranks, NUMEL, seed=0))
        for rank in (0, 2):
            job[rank].trouble(Trouble(1, loss=0.9, types=frozenset({PacketType.CONTRIBUTION}), to=frozenset({1})))
        for rank, (out, outcome) in enumerate(job.allreduce(gradients("U", ranks, NUMEL, seed=1))):
            assert outcome.skipped
            assert outcome.error is None
            assert not out.any()
            assert outcome.doubtful == (rank == 1)  # it cannot tell whether the others have heard it
        for rank in (0, 2):
            job[rank].trouble(None)
        inputs = gradients("U", ranks, NUMEL, seed=2)
        for out, outcome in job.allreduce(inputs):
            assert not outcome.skipped
            assert nmse(out, exact_mean(inputs)) < 1.5e-3
        stats = [member.stats() for member in job.communicators]
        assert [s["counters"]["ops_skipped"] for s in stats] == [1, 1, 1]
        assert stats[1]["counters"]["safeguard_skip"] == 1
        assert {"loss", "skipped"} <= {e["event"] for e in stats[1]["events"]}


def test_beyond_the_last_limit_every_rank_stops() -> None:
    ranks = 2
    with sim_team(ranks, patient(**PLAIN, safeguard=Limits(stop=0.5))) as job:
        job.allreduce(gradients("U", ranks, NUMEL, seed=0))
        job[0].trouble(Trouble(1, loss=0.95, types=frozenset({PacketType.CONTRIBUTION})))
        for _, outcome in job.allreduce(gradients("U", ranks, NUMEL, seed=1)):
            assert isinstance(outcome.error, TransportError)
            assert "safeguard" in str(outcome.error)
        for member in job.communicators:
            with pytest.raises(TransportError, match="more contributions were lost"):
                member.allreduce(np.ones(NUMEL, np.float32))
