"""A data loader that follows the job: a rank that was away skips the batches of the steps it does not compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tailbound.torch.state import TailboundState

T = TypeVar("T")


def batches(
    loader: Iterable[T],
    state: TailboundState,
    *,
    step: Callable[[], object] | None = None,
    on_skip: Callable[[int], object] | None = None,
    per_step: int = 1,
) -> Iterator[T]:
    """Yields the batches of ``loader``, those left out that belong to steps the others have finished without this rank.

    Before every step, a rank that is behind applies the finished steps (``state.apply_finished``); one that is so far
    behind that their averages are gone joins the others at their next step and takes their state (``state.jump``,
    clock-20). Either way as many batches are skipped, so that all ranks stay at the same place in the data.

    Args:
        loader: this rank's batches.
        state: what ``register`` returned.
        step: what to do with the gradients of an applied step: clipping, ``optimizer.step()``, the scheduler, whatever
            the loop does after ``backward``; default: ``step()`` of the optimizers whose turn it is.
        on_skip: called with the number of steps skipped, not applied (to move a scheduler on, say).
        per_step: batches that make one step (gradient accumulation).

    What is left to skip at the end of ``loader`` is skipped at the beginning of the next one.
    """
    source = iter(loader)
    place = 0
    for batch in source:
        if place == 0:
            if not state.owed_batches:
                moved = _jump(state, on_skip) + state.apply_finished(step=step)
                state.owed_batches = per_step * (moved + _jump(state, on_skip))  # averages may have been gone
            if state.owed_batches:
                state.owed_batches -= 1
                continue
        place = (place + 1) % per_step
        yield batch


def _jump(state: TailboundState, on_skip: Callable[[int], object] | None) -> int:
    """Steps that this rank has skipped, told to ``on_skip``."""
    skipped = state.jump()
    if skipped and on_skip is not None:
        on_skip(skipped)
    return skipped
