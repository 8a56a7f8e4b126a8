"""Batches of steps that this rank does not compute are left out, over the ends of epochs too."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="missing capability 'torch': pip install 'tailbound[torch]'")
from tailbound.errors import ConfigError
from tailbound.torch import batches
from tailbound.torch.turns import Turns


class Away:
    """Stands in for the state: says before which steps this rank is how far behind, or lost."""

    def __init__(
        self, applied: dict[int, int] | None = None, jumps: dict[int, int] | None = None, gone: int | None = None
    ) -> None:
        self.applied, self.jumps = applied or {}, jumps or {}
        self.gone = gone  #: the step whose averages are gone when it is to be applied
        self.owed_batches, self.detached = 0, False
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
    out = []
    for epoch in epochs:
        seen = []
        for place, batch in enumerate(batches(epoch, state, **options)):
            seen.append(batch)
            state.step += (place + 1) % options.get("per_step", 1) == 0
        out.append(seen)
    return out


@pytest.mark.parametrize(
    ("applied", "jumps", "gone", "epochs", "per_step", "seen", "calls"),
    [
        ({}, {}, None, [5], 1, [[0, 1, 2, 3, 4]], []),
        ({2: 3}, {7: 2}, None, [12], 1, [[0, 1, 5, 6, 9, 10, 11]], [0, 0, 0, 2]),  # as many batches as steps
        ({3: 1}, {1: 2}, None, [6], 1, [[0, 4, 5]], [2, 0]),  # a jump, and then finished steps
        ({2: 3}, {}, 5, [9], 1, [[0, 1, 6, 7, 8]], [0, 0, 0, 1]),  # a step whose averages are gone is told
        ({}, {3: 4}, None, [5, 5], 1, [[0, 1, 2], [2, 3, 4]], [4]),  # what is left goes into the next epoch
        ({1: 2}, {}, None, [10], 2, [[0, 1, 6, 7, 8, 9]], [0, 0]),
    ],
)
def test_batches_of_steps_that_are_not_computed_are_left_out(
    applied: dict[int, int],
    jumps: dict[int, int],
    gone: int | None,
    epochs: list[int],
    per_step: int,
    seen: list[list[int]],
    calls: list[int],
) -> None:
    """``calls``: 0 for each applied step, the number of those that were skipped."""
    made: list[int] = []
    state = Away(applied, jumps, gone)
    options: Any = {"step": lambda: made.append(0), "on_skip": made.append, "per_step": per_step}
    assert run(state, [range(epoch) for epoch in epochs], **options) == seen
    assert made == calls
    assert state.step == sum(epochs) // per_step


def test_two_loops_at_a_time_are_refused_and_two_in_turn_are_not() -> None:
    state: Any = Away()
    left = batches(range(5), state)
    assert next(left) == 0
    assert run(state, [range(3)]) == [[0, 1, 2]]
    with pytest.raises(ConfigError, match=r"batches\(zip\(a, b\), state\)"):
        list(zip(batches(range(9), state), batches(range(9), state), strict=True))
