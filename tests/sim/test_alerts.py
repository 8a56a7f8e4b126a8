"""Jobs in virtual time name the rank that is late and the link that loses, once, and say when it is over."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from sim.team import Member, SimTeam, sim_team
from support import Trouble, gradients, hasty, patient
from tailbound.collective import alerts
from tailbound.simulate.fabric import MS
from tailbound.wire.schema import PacketType

RANKS, WIDTH = 3, 64
NUMEL = 8 * 64 * WIDTH
GIVEN = {"width": WIDTH, "ring_mib": 1.0, "share_rows": False}
DELAY = 80 * MS
#: Ops that follow each other faster than this are not looked at one by one.
APART = 21 * MS


def until(job: SimTeam, done: Callable[[], bool], late: dict[int, int] | None = None, most: int = 120) -> int:
    """All-reduces, some ranks launching later, until ``done``; how many."""
    inputs = gradients("U", RANKS, NUMEL, seed=1)
    for ops in range(most):
        if done():
            return ops
        for _, outcome in job.allreduce(inputs, late=late):
            assert outcome.error is None
        job.go(APART)
    pytest.fail(f"not within {most} ops: {[events(c) for c in job.communicators]}")


def events(member: Member) -> list[tuple[str, dict[str, Any]]]:
    """What a rank has said of late ranks and links, with the fields."""
    names = ("late", "in_time", "link_loses", "link_well", "back")
    return [(e.name, e.fields) for e in member.job.events.recent() if e.name in names]


def of_rank(member: Member, event: str, rank: int) -> list[dict[str, Any]]:
    return [fields for name, fields in events(member) if name == event and fields["late"] == rank]


def test_a_late_rank_is_named_by_one_rank_and_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    late = 2
    with caplog.at_level(logging.INFO, "tailbound"), sim_team(RANKS, patient(**GIVEN)) as job:
        until(job, lambda: all(of_rank(c, "late", late) for c in job.communicators), {late: DELAY}, 30)
        until(job, lambda: all(of_rank(c, "in_time", late) for c in job.communicators), most=30)
        for member in job.communicators:
            (begin,), (end,) = of_rank(member, "late", late), of_rank(member, "in_time", late)
            assert begin["ms"] == pytest.approx(DELAY / MS, rel=0.1)
            assert end["step"] - begin["step"] == end["steps"] > 0
    said = [r for r in caplog.records if getattr(r, "tailbound", {}).get("late") == late]
    warned = [r.getMessage() for r in said if r.levelno == logging.WARNING]
    assert len(warned) == 2
    assert any(w.startswith("rank 0: rank 2 is late: its gradients come ") for w in warned)
    assert any(w.startswith("rank 2: this rank is late: ") for w in warned)
    assert all("Look at its host" in w for w in warned)
    recovered = [r.getMessage() for r in said if "is in time again" in r.getMessage()]
    assert len(recovered) == RANKS


def test_the_link_that_loses_is_named_by_its_receiver(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alerts, "WINDOW", 300)
    with sim_team(RANKS, patient(**GIVEN, repair=False, quiet=20 * MS)) as job:
        until(job, lambda: job[0].job.counters["ops"] > 2)
        trouble = Trouble(3, loss=0.15, types=frozenset({PacketType.CONTRIBUTION}), to=frozenset({0}))
        job[2].trouble(trouble)
        until(job, lambda: any(name == "link_loses" for name, _ in events(job[0])))
        trouble.loss = 0.0
        until(job, lambda: any(name == "link_well" for name, _ in events(job[0])))
        found = [(name, fields) for name, fields in events(job[0]) if name.startswith("link")]
        assert [(name, fields["peer"]) for name, fields in found] == [("link_loses", 2), ("link_well", 2)]
        assert 0.03 < found[0][1]["share"] < 0.15  # half of the rows are contributions
        assert found[0][1]["others"] == 0
        for member in job.communicators[1:]:
            assert not [name for name, _ in events(member) if name.startswith("link")]
    assert "are lost on the way from rank 2 to this one" in caplog.text
    assert "ethtool -S" in caplog.text


def test_a_suspect_that_comes_back_is_named_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tailbound"), sim_team(RANKS, hasty(**GIVEN)) as job:
        until(job, lambda: job[0].job.counters["ops"] > 2)
        job[2].trouble(Trouble(1, loss=1.0))
        assert until(job, lambda: 2 in job[0].job.membership.contribution.suspects) == 3
        job[2].trouble(None)
        until(job, lambda: any(name == "back" and fields["back"] == 2 for name, fields in events(job[0])), most=5)
    assert "rank 0: rank 2 is waited for again" in caplog.text
