"""Where a rank is in the job, and how it comes back where it is lost, with the other ranks played (clock-20)."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from solo import without_job
from tailbound.errors import TransportError

pytest.importorskip("torch", reason="missing capability 'torch': pip install 'tailbound[torch]'")
import torch

from tailbound.torch.absence import step_optimizers
from tailbound.torch.finished import Layout
from tailbound.torch.steps import BY_ITSELF, Steps


def test_every_transition_has_a_test(repository: Path) -> None:
    """The table of ``docs/torch/failures.md``; a test says ``States: in step to behind, behind to in step.``"""
    page = (repository / "docs/torch/failures.md").read_text()
    section = page.split("## States of a rank")[1].split("\n## ")[0]
    rows = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in section.splitlines() if "|" in line]
    said: set[tuple[str, ...]] = set()
    for path in (repository / "tests").rglob("test_*.py"):
        for words in re.findall(r"States: ([a-z, ]+)\.(?!`)", path.read_text()):
            said |= {tuple(each.split(" to ")) for each in words.split(", ")}
    assert set(rows[2:]) == said


@pytest.mark.parametrize(
    ("behind", "lost", "void", "outside", "place"),
    [
        (0, False, False, False, "IN_STEP"),
        (2, False, False, False, "BEHIND"),
        (2, True, False, False, "LOST"),
        (2, True, True, False, "VOID"),
        (0, False, True, True, "OUTSIDE"),
    ],
)
def test_a_rank_is_in_one_place(behind: int, lost: bool, void: bool, outside: bool, place: str) -> None:
    """States: in step to behind, behind to lost, lost to void, void to in step."""
    one = without_job(communicator=SimpleNamespace(behind=behind, lost=lost))
    one.absence.void, one.entrance = void, SimpleNamespace(outside=True) if outside else None
    assert one.absence.place.name == place
    one.communicator = None
    assert one.absence.place.name == "IN_STEP"


def test_a_rank_abstains_until_it_is_sound() -> None:
    """States: abstaining to contributing."""
    one = without_job(communicator=SimpleNamespace())
    one.resync = SimpleNamespace(
        sound=False, boundary=lambda step, still: None, replica=SimpleNamespace(optimizers=[SimpleNamespace(state={})])
    )
    one.absence.abstaining = True
    for sound in (False, True):
        one.steps.ended, one.steps.stepped, one.resync.sound = 3, True, sound
        one.end_step(still=True)
        assert one.absence.abstaining is not sound


@pytest.mark.parametrize(
    ("fields", "passes", "most", "words"),
    [
        ({"together": "all ranks wait for each other"}, 1, 10, "A larger ring_mib"),
        ({"resync": None}, 1, 10, "A larger ring_mib"),
        ({"resync": None}, 0, 24, r"give every iteration of tailbound\.torch\.batches the same"),  # they differ
    ],
)
def test_a_rank_that_cannot_join_ends_with_an_error_unless_it_catches_up(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], passes: int, most: int, words: str
) -> None:
    monkeypatch.setattr(Steps, "passes", passes)
    one = without_job(communicator=SimpleNamespace(lost=True, behind=7), **fields)
    for one.communicator.lost in ([True] * (most - 2) + [False]) * 3 + [True] * (most - 1):
        one.rejoin()
    with pytest.raises(TransportError, match=rf"7 steps behind.*Restart this rank's processes.*{words}"):
        one.rejoin()


def test_a_lost_rank_joins_where_the_program_says_when_steps_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was left for the forward pass to end, and so it did not look."""
    one, looked = without_job(communicator=SimpleNamespace(lost=True, behind=7)), []
    monkeypatch.setattr(one, "rejoin", lambda: looked.append(one.steps.ended))
    for step in range(3):
        one.steps.ended = step
        one.boundary()
        one._before_forward()
        one._before_forward()  # an evaluation, say
        assert looked == [None] * (step + 1)


class Job:
    """The other ranks, at ``newest``: the step that they are in, or before which they wait (``waits``)."""

    def __init__(self, newest: int, ring: int = 2) -> None:
        self.step, self.newest, self.ring, self.waits = 0, newest, ring, False
        self.jumps: list[tuple[int, int]] = []

    @property
    def behind(self) -> int:
        return max(0, self.newest - self.step)

    @property
    def lost(self) -> bool:
        return self.behind > self.ring

    def begun(self) -> bool:
        return not self.waits

    def drain(self, timeout: float) -> bool:
        return True

    def jump(self) -> int:
        next_one = self.newest + (not self.waits)
        self.jumps.append((self.step, next_one))
        skipped, self.step = next_one - self.step, next_one
        return skipped


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A rank that is lost: the others are in step 6, it is before step 0, and its program skips no batches."""
    job = Job(newest=6)
    made = without_job(ranks=3, communicator=job, say=lambda *_: None, taken=[], _new_step=True)
    made.resync = SimpleNamespace(
        unsound=lambda: None,
        part=lambda: None,
        moment=SimpleNamespace(disturb=lambda: None, changes=0),
        boundary=lambda step, still: None,
        step_time=0.0,
        replica=SimpleNamespace(optimizers=[SimpleNamespace(state={})]),
        sound=True,
    )

    def take(_until: float, more: int = 0) -> int:
        """The state after that step, or the last one that is over."""
        stands = max(job.step - 1 + more, job.newest - 1)
        job.newest = max(job.newest, stands)
        made.taken.append(stands)
        moved, job.step = stands + 1 - job.step, stands + 1
        return moved

    monkeypatch.setattr(Layout, "settled", True)
    monkeypatch.setattr(made.absence, "take_state", take)
    return made


def iteration(one: Any) -> bool:
    """Forward and backward pass, and the optimizer's step. Returns whether it was void."""
    one._before_forward()
    one.before_backward()
    void = bool(one.absence.void)
    if void:
        one.absence.made()
        one.steps.averaged(BY_ITSELF)
        one.steps.passed()
    else:
        one.communicator.step += 1
        one.steps.ended = one.communicator.step - 1
    one.steps.stepped = True
    return void


def test_iterations_are_void_until_the_program_is_where_the_job_is(lost: Any) -> None:
    """It trained alone by as many steps as it had skipped, while the others waited for it in a collective.

    States: lost to void, void to in step.
    """
    voids = [iteration(lost) for _ in range(9)]
    assert voids == [True] * 7 + [False] * 2  # steps 0 to 6
    assert lost.communicator.jumps == [(0, 7)]
    assert lost.taken == [6]
    assert (lost.communicator.step, lost.absence.lag) == (9, 0)


@pytest.mark.parametrize(("made", "well"), [(1, False), (6, True)])
def test_a_lost_rank_is_synchronized_where_its_program_has_made_all_steps(lost: Any, made: int, well: bool) -> None:
    """The others waited for it in ``synchronize`` until their time was over, and it went on to save what it had."""
    lost.communicator.waits = True
    lost.resync.moment.step, lost.resync.synchronize = 0, lambda timeout: True
    assert all(iteration(lost) for _ in range(made))
    assert lost.synchronize() is well
    assert (lost.communicator.step, lost.absence.void, lost.absence.lag) == (6, not well, 6 - made)
    assert lost.taken == [5]


def followed(one: Any, every: int) -> int:
    """Iterations until its steps are void no more; the others make one in ``every`` so many."""
    made = 0
    while not made or one.absence.void:
        iteration(one)
        made += 1
        one.communicator.newest += made % every == 0
    return made


def test_others_that_go_on_meanwhile_are_followed(lost: Any) -> None:
    assert followed(lost, 2) - 1 == lost.taken[-1] + 1 == 13  # the program is before the step after the state
    assert lost.absence.lag == 0


def test_a_program_that_does_not_get_there_goes_on_and_lags(lost: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The others make a step in the time of each of its iterations; it makes those void that would be its own alone."""
    made = followed(lost, 1)
    assert re.search(r"are (\d+) steps behind theirs", caplog.text)
    assert made < 50
    lag = lost.absence.lag
    assert lag > 0
    lost.communicator.newest = lost.communicator.step
    assert not iteration(lost)
    lost.communicator.waits = True  # in a collective of the program, after this step
    lost.communicator.newest = lost.communicator.step - 1
    step = lost.communicator.step
    assert [iteration(lost) for _ in range(lag)] == [True] * lag
    lost.end_step(still=True)
    assert (lost.communicator.step, lost.taken[-1], lost.absence.lag, lost.absence.void) == (step, step - 1, 0, False)


def test_a_program_that_skips_by_itself_makes_no_void_step(lost: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears what was skipped, so that it can move a scheduler on: once, with what its entrance has skipped."""
    monkeypatch.setattr(lost.absence, "take_state", lambda _: 0)
    lost.absence.skipped = 4
    assert lost.catch_up() == (0, 4 + 7)
    lost.communicator.newest = 20
    assert not iteration(lost)
    assert lost.catch_up() == (0, 13)


def test_who_is_lost_again_while_a_state_comes_joins_without_one(lost: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state took longer than the ring lasts: it was taken for nothing thirty times, then training ended."""
    taken: list[float] = []

    def take(until: float) -> int:
        taken.append(until)
        lost.communicator.newest += 4
        lost.absence.abstaining = False
        return 0

    monkeypatch.setattr(lost.absence, "take_state", take)
    assert lost.absence.jump(30.0) == lost.communicator.step == 15
    assert len(taken) == 2
    assert (lost.communicator.lost, lost.absence.abstaining) == (False, True)


@pytest.mark.parametrize("patient", [True, False])
def test_void_steps_end_where_nobody_is_left(lost: Any, monkeypatch: pytest.MonkeyPatch, patient: bool) -> None:
    """The others had died meanwhile: the program went on to its end by zeros, and exit status 0."""

    def nobody() -> int:
        raise TransportError("nobody said where to join")

    monkeypatch.setattr(lost.communicator, "jump", nobody)
    if not patient:
        monkeypatch.setattr("tailbound.torch.absence._VOID", 0)
        monkeypatch.setattr("tailbound.torch.absence._VOID_MORE", 0)
    made: list[bool] = []
    with pytest.raises(TransportError, match="cannot join the others: 10 steps running had zeros"):
        made.extend(iteration(lost) for _ in range(100))
    assert made == [True] * (16 if patient else 10)


@pytest.mark.parametrize(("lag", "passes", "whole"), [(3, 1, True), (3, 2, False), (4, 2, True), (3, 0, False)])
def test_a_loop_lags_by_whole_iterations(
    lost: Any, monkeypatch: pytest.MonkeyPatch, lag: int, passes: int, whole: bool
) -> None:
    """With an odd lag the first pass of an iteration would be averaged with the others' second one, for good."""
    monkeypatch.setattr(Steps, "passes", passes)
    lost.communicator.newest = lost.communicator.step
    lost.absence.void, lost.absence.lag = True, lag  # and it is patient no longer
    monkeypatch.setattr(lost.absence, "take_state", lambda _: 0)
    lost.absence.follow()
    assert lost.absence.void is not whole


@pytest.mark.parametrize("scaled", [False, True])
def test_applied_steps_go_through_the_scaler(scaled: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 1.0)
    one = without_job(resync=SimpleNamespace(replica=SimpleNamespace(optimizers=[optimizer])))
    if scaled:
        one.scaler = torch.amp.GradScaler("cpu", 65536.0)
        one.scaler.scale(torch.ones(1))
    weight.grad = torch.full((1,), 65536.0 if scaled else 1.0)
    step_optimizers(one)
    assert weight.tolist() == [-1]
