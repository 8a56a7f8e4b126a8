"""A data loader that follows the job: a rank that was away skips the batches of the steps it does not compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tailbound.errors import ConfigError
from tailbound.torch.state import TailboundState, attached

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

    Before every iteration of the loop, a rank that is behind applies the finished ones, or joins the others at their
    next one and takes their state (``state.catch_up``). Either way as many batches are skipped, so that all ranks stay
    at the same place in the data. What is left to skip at the end of ``loader`` is skipped in the next.

    Args:
        loader, state: this rank's batches, and what ``register`` returned.
        step: what to do at the end of an applied iteration: clipping, ``optimizer.step()``, the scheduler, whatever
            the loop does after its last ``backward``; default: ``step()`` of the optimizers whose turn it is. Steps
            after earlier passes of an iteration are ``step()`` of their optimizers in any case.
        on_skip: called with the number of iterations skipped, not applied (to move a scheduler on, say).
        per_step: batches that make one step (gradient accumulation). Fewer may be left for the last one of ``loader``:
            whether the loop makes that step, leaves it out or ends it with the next loader is learned.

    Where another registered model makes steps in the loop, no batch is left out: the models would skip apart. The
    iterations of a rank that was away for too long are void then, as without ``batches``.

    Raises:
        ConfigError: no rank can skip a step alone, ``per_step`` is not what the loop does, a batch was asked for before
            ``optimizer.step()``, or another loop has begun within this one.
    """
    if not isinstance(state, TailboundState):
        raise ConfigError(f"batches(..., {type(state).__name__}): give a loader and what register returned")
    if per_step < 1:
        raise ConfigError(f"per_step={per_step}: give the number of batches that make one step, 1 or more")
    count, others, alone = 0, _steps_of_others(state), True
    loop = state.loop = object()
    state.steps.start()
    for batch in loader:
        if count % per_step == 0 and not state.detached:
            before, others = others, _steps_of_others(state)
            alone = alone and all(before.get(one, at) == at for one, at in others.items())
            if not alone:
                state.absence.skips = False
            elif not state.owed_batches and state.steps.between_iterations():
                applied, skipped = state.catch_up(step)
                state.owed_batches = per_step * (applied + skipped)
                if skipped and on_skip is not None:
                    on_skip(skipped)
        count += 1
        if state.owed_batches:
            state.owed_batches -= 1
            continue
        yield batch
        if state.loop is not loop:
            raise ConfigError(
                "another tailbound.torch.batches of the same model has begun within this loop, and each would count "
                "its iterations. Give one of them both loaders, as in batches(zip(a, b), state)"
            )
        if count % per_step == 0 and not state.detached:
            state.steps.iterate()
            if (apart := state.steps.apart) > 1:
                raise ConfigError(
                    f"{apart * per_step} batches make one step here, and per_step is {per_step}: a rank that was away "
                    f"would skip too few. Give tailbound.torch.batches(..., per_step={apart * per_step})"
                )
    rest, ends = count % per_step, state.steps.short_ends
    if rest and not state.owed_batches:
        ends.add(state.steps.updates)
    elif rest and False not in ends:  # they were a step
        state.owed_batches += rest - per_step
    elif rest and True not in ends and count > rest:  # they were of none; else they are of one in the next loader, too
        state.owed_batches += rest


def _steps_of_others(state: TailboundState) -> dict[int, int]:
    """Steps that other registered models of this process have made, where they do not catch up by themselves."""
    return {id(other): other.steps.made for other in attached() if other is not state and not other.absence.skips}
