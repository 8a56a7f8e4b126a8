"""What is worth a line: episodes that begin, last and end; links that lose, told apart from a receiver that does.

And warnings of buckets: how an op is called, and how often a line comes.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from tailbound.collective.alerts import REMINDERS, Alerts, Episodes, Losses
from tailbound.collective.op import Outcome
from tailbound.observe.events import LINES

pytest.importorskip("torch", reason="missing capability 'torch': pip install 'tailbound[torch]'")
from tailbound.torch.complaints import Complaints

S = 1_000_000_000
#: Shares of rows that are lost, by peer.
CLEAN, BETWEEN, BAD = {1: 0.0, 2: 0.001, 3: 0.0}, {1: 0.0, 2: 0.01, 3: 0.0}, {1: 0.0, 2: 0.05, 3: 0.001}


def test_an_episode_begins_and_ends_after_observations_alike() -> None:
    late = Episodes(begin=3, end=2)
    said = [late.see(7, so, now=0, at=step) for step, so in enumerate([True, True, False, True, True, True, True])]
    assert said == [None, None, None, None, None, "begins", None]
    assert late.running(7)
    assert late.begun(7) == 5
    assert [late.see(7, so, 0, 9) for so in (False, None, False, False, False)] == [None, None, None, "over", None]
    assert not late.running(7)
    assert late.begun(7) == 5  # so that the end can say how long it was
    assert not late.running(8)
    assert [late.see(8, True, 0) for _ in range(3)] == [None, None, "begins"]  # each key has its own


def test_reminders_come_ever_more_rarely() -> None:
    late = Episodes(begin=1, end=1)
    late.see(1, True, 0)
    said = [at for at in range(1, 3 * REMINDERS.most // S) if late.see(1, True, at * S) == "lasts"]
    assert said[0] == REMINDERS.first // S
    pauses = [b - a for a, b in itertools.pairwise(said)]
    assert pauses[:3] == [2 * REMINDERS.first // S, 4 * REMINDERS.first // S, 8 * REMINDERS.first // S]
    assert max(pauses) == REMINDERS.most // S
    assert late.see(1, False, 0) == "over"
    assert late.see(1, True, 0) == "begins"


def watch(shares: list[dict[int, float]], window: int = 100) -> list[tuple[int | None, str]]:
    """What is said, window by window, of peers that lose these shares of 1000 rows each."""
    losses, said = Losses(window), []
    totals = dict.fromkeys(shares[0], (0, 0))
    losses.update(totals, 0)
    for now, one in enumerate(shares):
        totals = {peer: (totals[peer][0] + 1000, totals[peer][1] + int(1000 * share)) for peer, share in one.items()}
        said += [(found.peer, found.turn) for found in losses.update(totals, now)]
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


def test_shares_are_those_of_the_last_window() -> None:
    losses = Losses(100)
    losses.update({1: (0, 0), 2: (0, 0)}, 0)
    assert losses.update({1: (60, 30), 2: (60, 0)}, 0) == []  # too few rows to judge
    losses.update({1: (1000, 100), 2: (1000, 0)}, 0)
    (found,) = losses.update({1: (2000, 300), 2: (2000, 10)}, 0)
    assert (found.peer, found.share, found.others) == (1, 0.2, 0.01)


def test_a_rank_says_itself_that_it_waits_for_the_interpreter_lock() -> None:
    """Its peers see a rank that is late now and then, and nothing of the cause."""
    said: list[float] = []
    nobody = SimpleNamespace(suspects=frozenset(), gone=frozenset())
    known = SimpleNamespace(
        membership=nobody,
        overtime=SimpleNamespace(held_up=0),
        peers=[],
        repairs=SimpleNamespace(came=np.zeros((2, 0), np.int64)),
        records=SimpleNamespace(verdicts=lambda peers: []),
    )
    events = SimpleNamespace(emit=lambda kind, text, share, step: said.append(share))
    alerts = Alerts(known, None, events)
    for turn, share in enumerate([0.02] * 10 + [0.05] * 10 + [0.16] * 10 + [0.0] * 5):
        known.overtime.held_up += int(share * S)
        alerts.check(turn, {}, 0, (turn + 1) * S)
    assert said == [pytest.approx(0.16)]


def test_a_silent_rank_is_named_once_and_the_op_as_everywhere(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints(0)
    for _ in range(3):
        complaints.note(Outcome(label=26 << 10, missing={2}))
    assert caplog.messages == ["rank 0: nothing from rank(s) [2] in op 26.0"]


@pytest.mark.parametrize(("void", "cause"), [(True, "each had NaN or Inf values"), (False, "came in time")])
def test_a_gradient_of_zeros_has_its_cause(void: bool, cause: str, caplog: pytest.LogCaptureFixture) -> None:
    Complaints(0).note(Outcome(failed_groups=1, void=void))
    (line,) = caplog.messages
    assert cause in line


def test_what_comes_often_is_said_at_first_and_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    """Sentences of a kind that differ are thinned by ``Thinned`` (``test_observe``)."""
    complaints = Complaints(3, lambda: 0)
    for _ in range(1999):
        complaints.note(Outcome(overwritten=1))
    times = [int(text.rpartition("(")[2].split()[0]) for text in caplog.messages]
    assert times == [1, 10, 100, 1000]
    for step in range(100):
        complaints.say("overflow", f"gradients overflow: now {step}")
    assert len(caplog.records) == 4 + LINES
