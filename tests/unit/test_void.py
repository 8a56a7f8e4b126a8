"""A rank that was away, and whose program skips no batches: its iterations are void until it is where the job is.

Rule: clock-20.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.needs("torch")


class Job:
    """The other ranks, at ``newest``: the step that they are in; ``whole`` steps are over."""

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
        self.jumps.append((self.step, self.newest + 1))
        skipped, self.step = self.newest + 1 - self.step, self.newest + 1
        return skipped


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A rank that is lost: the others are in step 6, it is before step 0."""
    from tailbound.torch.recovery import Recovery

    made: Any = Recovery(0, 3, (0, 0.0))
    job = made.communicator = Job(newest=6)
    moment = SimpleNamespace(disturb=lambda: None, changing=False)
    made.resync = SimpleNamespace(
        unsound=lambda: None,
        moment=moment,
        step_time=0.0,
        replica=SimpleNamespace(optimizers=[SimpleNamespace(state={})]),
        sound=True,
    )
    made.say = made.forget = lambda *_: None
    made.taken = []

    def take(_state: Any, _job: Any, _until: float, more: int = 0) -> int:
        """The state after that step, or the last one that is over."""
        stands = max(job.step - 1 + more, job.newest - 1)
        job.newest = max(job.newest, stands)
        made.taken.append(stands)
        moved, job.step = stands + 1 - job.step, stands + 1
        return moved

    monkeypatch.setattr("tailbound.torch.catch_up.take_state", take)
    return made


def iteration(one: Any) -> bool:
    """Forward and backward pass, and the optimizer's step. Returns whether it was void."""
    one._before_forward()
    one.before_backward()
    void = bool(one.void.on)
    if void:
        one.void.made()
        one.rehearsed()
    else:
        one.communicator.step += 1
        one.ended = one.communicator.step - 1
        one.resync.boundary = lambda step, still: None
    one.stepped = True
    return void


def test_iterations_are_void_until_the_program_is_where_the_job_is(lost: Any) -> None:
    """It trained alone by as many steps as it had skipped, while the others waited for it in a collective.

    States: lost to void, void to in step.
    """
    lost._new_step = True
    voids = [iteration(lost) for _ in range(9)]
    assert voids == [True] * 7 + [False] * 2  # steps 0 to 6
    assert lost.communicator.jumps == [(0, 7)]
    assert lost.taken == [6]
    assert (lost.communicator.step, lost.void.lag) == (9, 0)


def test_others_that_go_on_meanwhile_are_followed(lost: Any) -> None:
    lost._new_step = True
    made = 0
    while not made or lost.void.on:
        iteration(lost)
        made += 1
        lost.communicator.newest += made % 2  # at half of its speed
    assert made - 1 == lost.taken[-1] + 1 == 14  # the program is before the step after the state
    assert lost.void.lag == 0


def test_a_program_that_does_not_get_there_goes_on_and_lags(
    lost: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others make a step in the time of each of its iterations; it makes those void that would be its own alone."""

    def jump(_state: Any, job: Any, _timeout: float) -> int:
        return int(job.jump())

    monkeypatch.setattr("tailbound.torch.catch_up.jump", jump)
    lost._new_step = True
    made = 0
    while not made or lost.void.on:
        iteration(lost)
        made += 1
        lost.communicator.newest += 1
    assert "are 7 steps behind theirs" in caplog.text
    assert made < 50
    lost.communicator.newest = lost.communicator.step
    assert not iteration(lost)
    lost.communicator.waits = True  # in a collective of the program, after this step
    lost.communicator.newest = lost.communicator.step - 1
    step = lost.communicator.step
    assert [iteration(lost) for _ in range(7)] == [True] * 7
    lost.end_step(still=True)
    assert (lost.communicator.step, lost.taken[-1], lost.void.lag, lost.void.on) == (step, step - 1, 0, False)


def test_a_program_that_skips_by_itself_makes_no_void_step(lost: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailbound.torch.catch_up.jump", lambda _state, job, _timeout: job.jump())
    assert lost.catch_up() == (0, 7)
    lost.communicator.newest = 20
    lost._new_step = True
    assert not iteration(lost)
    assert lost.catch_up() == (0, 13)


@pytest.mark.parametrize("patient", [True, False])
def test_void_steps_end_where_nobody_is_left(lost: Any, monkeypatch: pytest.MonkeyPatch, patient: bool) -> None:
    """The others had died meanwhile: the program went on to its end by zeros, and exit status 0."""
    from tailbound.errors import TransportError

    def nobody() -> int:
        raise TransportError("nobody said where to join")

    monkeypatch.setattr(lost.communicator, "jump", nobody)
    monkeypatch.setattr("tailbound.torch.catch_up.jump", lambda *_: 0)
    if not patient:
        monkeypatch.setattr("tailbound.torch.void.Void.patient", lambda _: False)
    lost._new_step = True
    made: list[bool] = []
    with pytest.raises(TransportError, match="cannot join the others: 10 steps running had zeros"):
        made.extend(iteration(lost) for _ in range(100))
    assert made == [True] * (16 if patient else 10)


def test_nothing_is_synchronised_in_void_steps(lost: Any) -> None:
    lost._new_step = True
    assert iteration(lost)
    assert not lost.synchronise()


@pytest.mark.parametrize(
    ("lag", "passes", "whole"), [(0, 0, True), (3, 0, False), (3, 1, True), (3, 2, False), (4, 2, True), (-1, 2, False)]
)
def test_a_loop_lags_by_whole_iterations(lag: int, passes: int, whole: bool) -> None:
    """With an odd lag the first pass of an iteration would be averaged with the others' second one, for good."""
    from tailbound.torch.void import Void

    assert Void(lag=lag).whole(passes) is whole
