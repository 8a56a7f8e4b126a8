"""Jobs in virtual time: books of what was lost on purpose, safeguards, and alerts that name a rank or a link once."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sim.team import Member, SimTeam, sim_team
from support import Trouble, balanced, exact_mean, gradients, hasty, nmse, patient
from tailbound.collective import alerts
from tailbound.errors import TransportError
from tailbound.transport.safeguard import Limits
from tailbound.wire.schema import UNKNOWN_SENDER, PacketType, Verdict
from tailbound_lab.simulate.fabric import MS

# -- the books, and safeguards that bind all ranks ---------------------------------------------------------------------


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


# -- the rank that is late and the link that loses are named, once, and when it is over --------------------------------


RANKS = 3
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
    assert all("Look at the sender's host" in w for w in warned)
    recovered = [r.getMessage() for r in said if "is in time again" in r.getMessage()]
    assert len(recovered) == RANKS


def test_a_rank_that_is_a_little_late_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tailbound"), sim_team(RANKS, patient(**GIVEN)) as job:
        until(job, lambda: all(of_rank(c, "late", 2) for c in job.communicators), {2: 12 * MS}, 60)
    said = [r for r in caplog.records if getattr(r, "tailbound", {}).get("late") == 2]
    assert said
    assert not [r.getMessage() for r in said if r.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("explained", "remedy"),
    [
        ("", "ethtool -S"),
        ("cannot_send", "The host of rank 2 refuses to send some: its log says"),
        ("here", "no cable is to blame"),
    ],
)
def test_the_link_that_loses_is_named_by_its_receiver_with_what_explains_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, explained: str, remedy: str
) -> None:
    monkeypatch.setattr(alerts, "WINDOW", 300)
    with sim_team(RANKS, patient(**GIVEN, repair=False, quiet=20 * MS)) as job:
        until(job, lambda: job[0].job.counters["ops"] > 2)
        job[2].trouble(Trouble(3, loss=0.15, types=frozenset({PacketType.CONTRIBUTION}), to=frozenset({0})))
        if explained == "here":
            monkeypatch.setattr(alerts.Alerts, "_on_this_host", lambda *_: True)
        elif explained:
            job[2].job.sender.refuse(0, errno.EPERM)
        until(job, lambda: any(name == "link_loses" for name, _ in events(job[0])))
        refused = [e.fields for e in job[2].job.events.recent() if e.name == "cannot_send"]
        assert [each["peers"] for each in refused] == [[0]] * (explained == "cannot_send")
        ((_, said),) = events(job[0])
        assert (said["peer"], said["others"]) == (2, 0)
        assert 0.03 < said["share"] < 0.15  # half of the rows are contributions
        assert not events(job[1]) + events(job[2])
    assert "are lost on the way from rank 2 to this one" in caplog.text
    assert remedy in caplog.text
    assert ("ethtool" in caplog.text) == (not explained)
    assert ("nft list ruleset" in caplog.text) == (explained == "cannot_send")


def test_who_is_not_waited_for_is_told_how_to_be_and_reminded_of(caplog: pytest.LogCaptureFixture) -> None:
    with sim_team(RANKS, hasty(**GIVEN)) as job:
        until(job, lambda: job[0].job.counters["ops"] > 2)
        job[2].trouble(Trouble(1, loss=1.0))
        until(job, lambda: 2 in job[0].job.membership.contribution.suspects)
        job.go(31_000 * MS)
        until(job, lambda: job[0].job.events.counts["away"])
    for words in ("no longer waiting for it", "nobody has waited for rank 2"):
        (line, *_) = [r.getMessage() for r in caplog.records if words in r.getMessage()]
        assert "state.hold()" in line
        assert "tailbound.torch.batches()" in line


def test_a_rank_that_was_left_out_of_the_map_is_no_suspect_once_it_is_well() -> None:
    """Rule: clock-14. It has no results to publish, by which it could clear itself."""
    with sim_team(RANKS, hasty(width=WIDTH, ring_mib=1.0)) as job:
        until(job, lambda: job[0].job.counters["ops"] > 5)
        job[2].trouble(Trouble(1, loss=1.0))
        until(job, lambda: 2 not in job[0].job.sequence.map.owners)
        job[2].trouble(None)
        until(job, lambda: not any(c.stats()["suspects"] for c in job.communicators), most=20)
        until(job, lambda: all(2 in c.job.sequence.map.owners for c in job.communicators), most=40)


def test_a_suspect_that_comes_back_is_named_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tailbound"), sim_team(RANKS, hasty(**GIVEN)) as job:
        until(job, lambda: job[0].job.counters["ops"] > 2)
        job[2].trouble(Trouble(1, loss=1.0))
        assert until(job, lambda: 2 in job[0].job.membership.contribution.suspects) == 3
        job[2].trouble(None)
        until(job, lambda: any(name == "back" and fields["back"] == 2 for name, fields in events(job[0])), most=5)
    assert "rank 0: rank 2 is waited for again" in caplog.text
