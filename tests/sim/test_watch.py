"""Jobs in virtual time: safeguards, and alerts that name a rank or a link once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sim.team import Member, SimTeam, sim_team
from support import Trouble, gradients, hasty, patient
from tailbound.collective import alerts
from tailbound.errors import TransportError
from tailbound.transport.config import Limits
from tailbound.wire.schema import PacketType
from tailbound_lab.simulate.fabric import MS

# -- safeguards that bind all ranks ------------------------------------------------------------------------------------


WIDTH = 64
NUMEL = 8 * 64 * WIDTH
CONTRIBUTIONS = frozenset({PacketType.CONTRIBUTION})
#: Rows stay where they are, so that every lost packet shows where it was lost.
PLAIN: dict[str, Any] = {"width": WIDTH, "ring_mib": 1.0, "share_rows": False, "quiet": 50 * MS}


def test_an_owner_that_lost_too_much_makes_all_ranks_skip() -> None:
    """One rank hears nothing of the others' rows: all of them get zeros for this op, and go on with the next one."""
    with sim_team(3, patient(**PLAIN, safeguard=Limits(skip=0.5))) as job:
        job.averaged(NUMEL, 0)
        for rank in (0, 2):
            job[rank].trouble(Trouble(1, loss=1.0, types=CONTRIBUTIONS, to=frozenset({1})))
        for rank, (out, outcome) in enumerate(job.averaged(NUMEL, 1)[1]):
            # rank 1 alone cannot tell whether the others have heard it
            assert (outcome.skipped, outcome.error, outcome.doubtful) == (True, None, rank == 1)
            assert not out.any()
        for rank in (0, 2):
            job[rank].trouble(None)
        job.right(NUMEL, 2)
        stats = [member.stats() for member in job.communicators]
        assert [s["counters"]["ops_skipped"] for s in stats] == [1, 1, 1]
        assert stats[1]["counters"]["safeguard_skip"] == 1
        assert {"loss", "skipped"} <= {e["event"] for e in stats[1]["events"]}


def test_what_is_missing_of_a_rank_that_is_not_waited_for_is_no_loss() -> None:
    """It says that it has sent its rows, which were lost while it was cut off. Rules: clock-14, clock-15."""
    with sim_team(3, patient(**PLAIN, safeguard=Limits(skip=0.3))) as job:
        job.averaged(NUMEL, 0)
        job[2].trouble(Trouble(1, loss=1.0, types=CONTRIBUTIONS, to=frozenset({1})))
        assert job[1].node.engine.suspect(2)
        for op in range(4):
            job.at(20 * MS, lambda: job[2].node.engine.ask_after(1))  # which says what it has sent
            assert not any(outcome.skipped for _, outcome in job.averaged(NUMEL, op, late={0: 40 * MS})[1])
        assert job.suspects == [[], [2], []]


def test_beyond_the_last_limit_every_rank_stops() -> None:
    with sim_team(2, patient(**PLAIN, safeguard=Limits(stop=0.5))) as job:
        job.averaged(NUMEL, 0)
        job[0].trouble(Trouble(1, loss=1.0, types=CONTRIBUTIONS))
        assert all("safeguard" in str(outcome.error) for _, outcome in job.averaged(NUMEL, 1)[1])
        for member in job.communicators:
            with pytest.raises(TransportError, match="more contributions were lost"):
                member.allreduce(np.ones(NUMEL, np.float32))


# -- the rank that is late and the link that loses are named, once, and when it is over --------------------------------


RANKS = 3
GIVEN = {"width": WIDTH, "ring_mib": 1.0, "share_rows": False}
#: Ops that follow each other faster than this are not looked at one by one.
APART = 21 * MS


def until(job: SimTeam, done: Callable[[], bool], late: dict[int, int] | None = None, most: int = 120) -> int:
    """All-reduces, some ranks launching later, until ``done``; how many."""
    inputs = gradients("U", RANKS, NUMEL, seed=1)
    for ops in range(most):
        if done():
            return ops
        assert not any(outcome.error for _, outcome in job.allreduce(inputs, late=late))
        job.go(APART)
    pytest.fail(f"not within {most} ops: {[said_of(c, 'late', 'link_loses', 'back') for c in job.communicators]}")


def said_of(member: Member, *names: str) -> list[dict[str, Any]]:
    """Fields of the events of these names that a rank has told."""
    return [event.fields for event in member.job.events.recent() if event.name in names]


@pytest.mark.parametrize(("delay", "warnings"), [(80 * MS, 2), (12 * MS, 0)])
def test_a_late_rank_is_named_by_one_rank_and_by_itself(
    delay: int, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    """That a rank is a little late is an event without a warning."""
    late = 2
    with caplog.at_level(logging.INFO, "tailbound"), sim_team(RANKS, patient(**GIVEN)) as job:
        until(job, lambda: all(said_of(c, "late") for c in job.communicators), {late: delay}, 60)
        until(job, lambda: all(said_of(c, "in_time") for c in job.communicators), most=30)
        for member in job.communicators:
            (begin,), (end,) = said_of(member, "late"), said_of(member, "in_time")
            assert begin["late"] == end["late"] == late
            assert begin["ms"] == pytest.approx(delay / MS, rel=0.1)
            assert end["step"] - begin["step"] == end["steps"] > 0
    said = [r for r in caplog.records if getattr(r, "tailbound", {}).get("late") == late]
    warned = sorted(r.getMessage() for r in said if r.levelno == logging.WARNING)
    assert len(warned) == warnings
    words = ("rank 0: rank 2 is late: its gradients come ", "rank 2: this rank is late: ")
    for text, begins in zip(warned, words, strict=False):
        assert text.startswith(begins)
        assert "Look at the sender's host" in text
    assert len([r for r in said if "is in time again" in r.getMessage()]) == RANKS


def test_the_link_that_loses_is_named_by_its_receiver_with_what_to_look_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alerts, "WINDOW", 300)
    with sim_team(RANKS, patient(**GIVEN, quiet=20 * MS)) as job:
        job.warm_up(NUMEL)
        job[2].trouble(Trouble(3, loss=0.15, types=CONTRIBUTIONS, to=frozenset({0})))
        until(job, lambda: bool(said_of(job[0], "link_loses")))
        ((said,), *others) = [said_of(c, "link_loses", "link_well", "late") for c in job.communicators]
        assert (said["peer"], said["others"], others) == (2, 0, [[], []])
        assert 0.03 < said["share"] < 0.15  # half of the rows are contributions
    assert "are lost on the way from rank 2 to this one" in caplog.text
    assert "ethtool -S" in caplog.text


def test_a_silent_rank_is_told_how_to_be_waited_for_and_reminded_of_and_is_taken_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Left out of the map it has no results to publish, by which it could clear itself. Rule: clock-14."""
    with caplog.at_level(logging.INFO, "tailbound"), sim_team(RANKS, hasty(width=WIDTH, ring_mib=1.0)) as job:
        job.warm_up(NUMEL, 5)
        job[2].trouble(Trouble(1, loss=1.0))
        assert until(job, lambda: 2 in job[0].job.membership.contribution.suspects) == 3
        assert 2 not in job[0]._engine.maps._lateness_of_all()  # a suspect hides no straggler (clock-22)
        until(job, lambda: 2 not in job[0].job.sequence.map.owners)
        job.go(31_000 * MS)
        until(job, lambda: bool(job[0].job.events.counts["away"]))
        job[2].trouble(None)
        until(job, lambda: bool(said_of(job[0], "back")), most=5)
        until(job, lambda: not any(job.suspects), most=20)
        until(job, lambda: job.placed_by((0, 1, 2)), most=40)
    for words in ("no longer waiting for it", "nobody has waited for rank 2"):
        (line, *_) = [r.getMessage() for r in caplog.records if words in r.getMessage()]
        assert "state.hold()" in line
        assert "tailbound.torch.batches()" in line
    for words in ("has sent no contribution", "has published no result", "is waited for again"):
        assert f"rank 0: rank 2 {words}" in caplog.text
