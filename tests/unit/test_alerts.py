"""What is worth a line: episodes that begin, last and end; links that lose, told apart from a receiver that does.

And warnings of buckets: how an op is called, and how often a line comes.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from sim.team import sim_team
from support import patient
from tailbound.collective.alerts import REMINDERS, Alerts, Episodes, Losses, fault_of
from tailbound.collective.op import Outcome

pytest.importorskip("torch", reason="missing capability 'torch': pip install 'tailbound[torch]'")
from tailbound.torch.complaints import Complaints

S = 1_000_000_000
#: Shares of rows that are lost, by peer.
CLEAN, BETWEEN, BAD = {1: 0.0, 2: 0.001, 3: 0.0}, {1: 0.0, 2: 0.01, 3: 0.0}, {1: 0.0, 2: 0.05, 3: 0.001}


def test_an_episode_begins_and_ends_after_observations_alike() -> None:
    late = Episodes(begin=3, end=2)
    said = [late.see(7, so, now=0, at=step) for step, so in enumerate([True, True, False, True, True, True, True])]
    assert said == [None, None, None, None, None, "begins", None]
    assert [late.see(7, so, 0, 9) for so in (False, None, False, False, False)] == [None, None, None, "over", None]
    assert (late.running(7), late.begun(7)) == (False, 5)  # so that the end can say how long it was
    assert [late.see(8, True, 0) for _ in range(3)] == [None, None, "begins"]  # each key has its own


def test_reminders_come_ever_more_rarely() -> None:
    late = Episodes(begin=1, end=1)
    late.see(1, True, 0)
    said = [at for at in range(1, 3 * REMINDERS.most // S) if late.see(1, True, at * S) == "lasts"]
    pauses = [b - a for a, b in itertools.pairwise([0, *said])]
    assert pauses[:4] == [n * REMINDERS.first // S for n in (1, 2, 4, 8)]
    assert max(pauses) == REMINDERS.most // S


def watch(shares: list[dict[int, float]], window: int = 100) -> list[tuple[int | None, str]]:
    """What is said, window by window, of peers that lose these shares of 1000 rows each."""
    losses, said = Losses(window), []
    totals = dict.fromkeys(shares[0], (0, 0))
    list(losses.update(totals, 0))
    for now, one in enumerate(shares):
        totals = {peer: (totals[peer][0] + 1000, totals[peer][1] + int(1000 * share)) for peer, share in one.items()}
        said += [(peer, turn) for peer, turn, *_ in losses.update(totals, now)]
    return said


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ([CLEAN, BAD, BAD, BAD, CLEAN, CLEAN, CLEAN], [(2, "begins"), (2, "over")]),
        ([CLEAN, BAD, CLEAN, BAD, CLEAN], []),  # one bad window is no bad link
        ([BETWEEN] * 6, []),
        ([BAD] * 2 + [BETWEEN] * 6, [(2, "begins")]),  # between the limits nothing changes
        # where all are lost alike it is the own link
        ([{1: 0.05, 2: 0.06, 3: 0.04}] * 4 + [CLEAN] * 3, [(None, "begins"), (None, "over")]),
        ([{1: 0.03, 2: 0.2, 3: 0.03}] * 3, [(None, "begins"), (2, "begins")]),  # and beside it the one that is worse
        ([{1: 0.05}] * 3, [(1, "begins")]),  # of two ranks the peer
    ],
)
def test_the_link_that_loses_is_named_and_cleared(
    shares: list[dict[int, float]], said: list[tuple[int | None, str]]
) -> None:
    assert watch(shares) == said


def test_a_rank_says_itself_that_it_waits_for_the_interpreter_lock() -> None:
    """Its peers see a rank that is late now and then, and nothing of the cause."""
    with sim_team(1, patient(width=64)) as alone:
        job = alone[0].job
        alerts = Alerts(job, None, job.events)
        for turn, share in enumerate([0.02] * 10 + [0.05] * 10 + [0.16] * 10 + [0.0] * 5):
            job.overtime.held_up += int(share * S)
            alerts.check(turn, {}, 0, (turn + 1) * S)
        (said,) = [event for event in job.events.recent() if event.name == "held_up"]
    assert said.fields["share"] == pytest.approx(0.16)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ({"label": 26 << 10, "missing": {2}}, "nothing from rank(s) [2] in op 26.0"),
        ({"failed_groups": 1, "void": True}, "each had NaN or Inf values (1 times"),
        ({"failed_groups": 1}, "no rank's rows of them came in time (1 times"),
    ],
)
def test_what_is_wrong_with_a_bucket_is_said_once(
    outcome: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    complaints = Complaints(0)
    for _ in range(3):
        complaints.note(Outcome(**outcome))
    (line,) = caplog.messages
    assert words in line


def test_what_comes_often_is_said_at_first_and_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints(3, lambda: 0)
    for _ in range(1999):
        complaints.note(Outcome(overwritten=1))
    assert [int(text.rpartition("(")[2].split()[0]) for text in caplog.messages] == [1, 10, 100, 1000]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"withdrawn": True}, "the program on eth0 was detached or replaced"),
        ({"active": 0}, "no packets are let in any more"),
        ({"tagged": 0}, "another process has switched the check of tags off"),
    ],
)
def test_what_is_wrong_with_the_program_is_an_error(wrong: dict[str, int], text: str) -> None:
    """Rules: kernel-5, auth-2."""
    control = {"active": [2], "tagged": [1]}
    known = SimpleNamespace(rank=3, store=SimpleNamespace(control=control), armed=True)
    path = SimpleNamespace(interface="eth0", withdrawn=False)
    assert fault_of(known, path) is None  # type: ignore[arg-type]
    path.withdrawn = bool(wrong.pop("withdrawn", False))
    control.update({name: [value] for name, value in wrong.items()})
    assert f"rank 3: {text}" in str(fault_of(known, path))  # type: ignore[arg-type]
