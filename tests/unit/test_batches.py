"""Batches of steps that this rank does not compute are left out, over the ends of epochs too."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.needs("torch")


class Away:
    """Stands in for the state: says before which steps this rank is how far behind, or lost."""

    def __init__(
        self, applied: dict[int, int] | None = None, jumps: dict[int, int] | None = None, gone: int | None = None
    ) -> None:
        from tailbound.torch.turns import Turns

        self.applied, self.jumps = applied or {}, jumps or {}
        self.gone = gone  #: the step whose averages are gone when it is to be applied
        self.owed_batches = 0
        self.steps, self.turns = self, Turns()
        self.early = set[int]()  #: steps before which a batch is asked for too early
        self.step = 0  # of the job, as this rank sees it

    def between_iterations(self) -> bool:
        return self.step not in self.early

    def catch_up(self, step: Any = None) -> tuple[int, int]:
        skipped, done = self.jumps.pop(self.step, 0), 0
        self.step += skipped
        if not skipped:
            done = self.applied.pop(self.step, 0)
        for _ in range(done):
            if step is not None:
                step()
        self.step += done
        if self.step == self.gone:
            self.gone = None
            self.step += 1
            skipped += 1
        return done, skipped


def run(state: Away, epochs: list[range], **options: Any) -> list[list[int]]:
    from tailbound.torch import batches

    out = []
    for epoch in epochs:
        seen = []
        for place, batch in enumerate(batches(epoch, state, **options)):  # type: ignore[arg-type]
            seen.append(batch)
            state.step += (place + 1) % options.get("per_step", 1) == 0
        out.append(seen)
    return out


def test_in_step_nothing_is_left_out() -> None:
    assert run(Away(), [range(5)]) == [[0, 1, 2, 3, 4]]


def test_as_many_batches_as_steps() -> None:
    calls: list[int] = []
    state = Away(applied={2: 3}, jumps={7: 2})
    assert run(state, [range(12)], step=lambda: calls.append(0), on_skip=calls.append) == [[0, 1, 5, 6, 9, 10, 11]]
    assert calls == [0, 0, 0, 2]
    assert state.step == 12


def test_two_loops_at_a_time_are_refused_and_two_in_turn_are_not() -> None:
    from tailbound.errors import ConfigError
    from tailbound.torch import batches

    state: Any = Away()
    left = batches(range(5), state)
    assert next(left) == 0
    assert run(state, [range(3)]) == [[0, 1, 2]]
    with pytest.raises(ConfigError, match=r"batches\(zip\(a, b\), state\)"):
        list(zip(batches(range(9), state), batches(range(9), state), strict=True))


def test_a_jump_and_then_finished_steps() -> None:
    assert run(Away(jumps={1: 2}, applied={3: 1}), [range(6)]) == [[0, 4, 5]]


def test_a_step_whose_averages_are_gone_is_left_out_and_told() -> None:
    skipped: list[int] = []
    state = Away(applied={2: 3}, gone=5)
    assert run(state, [range(9)], on_skip=skipped.append) == [[0, 1, 6, 7, 8]]
    assert skipped == [1]


def test_what_is_left_at_the_end_goes_into_the_next_epoch() -> None:
    assert run(Away(jumps={3: 4}), [range(5), range(5)]) == [[0, 1, 2], [2, 3, 4]]


def test_steps_of_several_batches() -> None:
    assert run(Away(applied={1: 2}), [range(10)], per_step=2) == [[0, 1, 6, 7, 8, 9]]
