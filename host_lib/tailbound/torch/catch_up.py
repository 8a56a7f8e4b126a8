"""A rank that was away applies what the others have finished meanwhile, or jumps and takes their state (clock-20)."""

from __future__ import annotations

import inspect
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from tailbound.collective.communicator import Communicator, Handling
from tailbound.collective.op import Outcome
from tailbound.errors import ConfigError, TransportError
from tailbound.torch.finished import Bucket, gradients
from tailbound.torch.memory import Memory
from tailbound.torch.turns import Turn
from tailbound.transport.steps import STEP_MASK, step_distance, step_of

#: A ``Recovery``, whose module imports this one.
Recovery: TypeAlias = Any

#: A rank that is lost again while it takes the others' state jumps so often. The last time it takes none, since that
#: takes longer than its ring lasts: it is not lost then, and takes a slice a step.
_JUMPS = 3
#: Seconds until another's state begins to come, where averages are gone; it has time by its size then.
_PATIENCE = 10.0
#: Times running that a lost rank may find that iterations differ: a loop's last one often does, and soon is forgotten.
_STUCK = 24
#: What to do with the averages of a pass that optimizers follow: these, or (None) those whose turn it is; and whether
#: no optimizer follows a later pass of the iteration.
Act: TypeAlias = "Callable[[Turn | None, bool], object]"


def apply_finished(state: Recovery, communicator: Communicator, act: Act) -> tuple[int, int]:
    """Applies finished iterations by ``act`` while this rank is behind by whole ones.

    Where the averages are gone (the owner map changed while this rank was away, say), it takes another rank's state.

    Returns:
        How many iterations were applied, and how many passes were skipped because their averages were gone.
    """
    applied, memory = 0, Memory()
    if not state.layout.ready:
        return 0, 0
    while (iteration := state.turns.iteration()) and communicator.behind >= len(iteration) and not communicator.lost:
        for number in range(len(iteration)):
            if not _apply(state, communicator, iteration, number, act, memory):
                skipped = number + 1 + take_state(state, communicator, time.monotonic() + _PATIENCE)
                return applied, skipped + _finish(state, communicator, skipped, act)
        applied += 1
    if not iteration and communicator.behind > 0:
        state.say(
            "no iteration",
            f"is {communicator.behind} backward passes behind, and cannot apply what the others have averaged: "
            "iterations differ in their passes, or an optimizer makes several in one step",
        )
    return applied, 0


def may_join(state: Recovery, behind: int) -> bool:
    """Whether a lost rank knows which pass of an iteration the others are in; else it would meet their other passes.

    Raises:
        ConfigError: it has not known that for long.
    """
    state.turns.stuck = 0 if state.turns.passes else state.turns.stuck + 1
    if state.turns.stuck < _STUCK:
        return not state.turns.stuck
    raise ConfigError(
        f"rank {state.rank}: is {behind} backward passes behind and cannot join the others: iterations of this loop "
        "differ in their backward passes, or an optimizer makes several in one step. Give every iteration of "
        "tailbound.torch.batches the same passes (all that belong to one step of the slowest optimizer, say), "
        "accumulate within no_sync(), and restart this rank"
    )


def _apply(
    state: Recovery, communicator: Communicator, iteration: Sequence[Turn | None], number: int, act: Act, memory: Memory
) -> bool:
    """Applies the averages of the next pass, ``number`` of ``iteration``.

    False: they are gone, and this rank's state is not that of the others.

    Where no optimizer follows the pass they are dropped: the gradients of the pass that one does follow have all that
    counts, if the program adds them up in ``.grad`` or clears it in between. Where it does neither they do not, so
    such a rank is made equal slice by slice.
    """
    turn, buckets = iteration[number], state.layout.step()
    averages, outcomes = _collect(state, communicator, buckets, memory)
    if any(outcome.missed > outcome.expected // 2 for outcome in outcomes) and state.resync is not None:
        state.resync.unsound()
        state.abstaining = True
        return False
    for average in averages:
        average.mul_(state.loss_scale)
    ended = step_of(outcomes[-1].label)
    own = state.rank in communicator.job.sequence.map_at(ended).owners
    if state.resync is not None and (own or turn == ()):
        state.resync.unsound()  # of own rows: they came too late for the others
    for bucket, outcome in zip(buckets, outcomes, strict=True):
        state.applied(outcome, bucket.last)
    if turn != ():
        known = state.resync.replica.optimizers if state.resync is not None else []
        with gradients(buckets, averages, state.layout.unused(), _others(known)):
            act(turn, all(later == () for later in iteration[number + 1 :]))
        communicator.job.counters["steps_applied"] += 1
    state.end_step(still=turn != ())
    return True


def _finish(state: Recovery, communicator: Communicator, moved: int, act: Act) -> int:
    """Goes on to where the program is in its iteration, after a move by so many passes; returns how many these were."""
    iteration, memory, more = state.turns.iteration(), Memory(), 0
    while iteration and state.layout.ready and (moved + more) % len(iteration):
        _apply(state, communicator, iteration, (moved + more) % len(iteration), act, memory)
        more += 1
    return more


def _others(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """All that they step: what is in no bucket of this model is not to be stepped by the gradient of another step."""
    return (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])


def step_optimizers(state: Recovery, turn: Turn | None = None) -> None:
    """``step()`` of the model's optimizers of ``turn``, or of those whose turn it is (``Turns``).

    Averages have the loss scale, so a gradient scaler takes it off them first, if there is one.

    Raises:
        ConfigError: none is known.
    """
    due = state.turns.due(state.resync.replica.optimizers if state.resync is not None else [], turn)
    if not due:
        raise ConfigError("no optimizer is known: pass optimizer= to register")
    for one in due:
        if state.scaler is None:
            _step(one)
        else:
            state.scaler.step(one)
    if state.scaler is not None:
        state.scaler.update()


def _step(optimizer: torch.optim.Optimizer) -> None:
    """``step()`` by the gradients that are there; what asks for a closure (LBFGS) is given one that makes no pass."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        optimizer.step(lambda: 0.0)
    else:
        optimizer.step()


def jump(state: Recovery, communicator: Communicator, timeout: float) -> int:
    """Joins the others at their next step and takes their state; returns how many steps this rank has moved on.

    Args:
        timeout: seconds until a state begins to come; it has time by its size then.

    Raises:
        ConfigError: iterations differ in their passes, and have for long.
    """
    until, moved = time.monotonic() + timeout, 0
    if not state.layout.settled:
        return 0
    if not may_join(state, communicator.behind):
        return 0
    communicator.drain(2)
    for number in range(1, _JUMPS + 1):
        if not communicator.lost:
            break
        try:
            skipped = communicator.jump()
        except TransportError as error:
            state.say("jump failed", str(error))
            break
        if not skipped:
            break
        state.abstaining = True
        state.forget()
        if state.resync is not None:
            state.resync.unsound()
        moved += skipped
        if number < _JUMPS:
            moved += take_state(state, communicator, until)
        else:
            state.say("no state", "is lost again by when another's state has come; abstains until it has it, in slices")
    if moved:
        moved += _finish(state, communicator, moved, lambda turn, _: step_optimizers(state, turn))
        state.say("jumped", f"was away for too long and has skipped {moved} steps")
    return moved


def take_state(state: Recovery, communicator: Communicator, until: float, more: int = 0) -> int:
    """Takes the state of another rank as it is ``more`` steps after the one before the next one here, or later.

    In the latter case the steps in between are taken part in, without rows, and their averages dropped.

    Returns:
        How many those were. The rank goes on abstaining if no state began to come until ``until`` (monotonic seconds;
        those that its size costs come on top), or not all of it did.
    """
    if state.resync is None:
        return 0
    before = communicator.step - 1 + more & STEP_MASK
    stands = state.resync.adopt_any(before, until - time.monotonic())
    if stands is None:
        state.say("no state", "no rank gave a state to continue from; this rank abstains until one does")
        return 0
    state.forget()
    dropped, memory = 0, Memory()
    while (buckets := state.layout.step()) and step_distance(stands, communicator.step) >= 0:
        _collect(state, communicator, buckets, memory)
        dropped += 1
    state.ended = None
    state.abstaining = step_distance(stands, communicator.step) >= 0
    if state.abstaining:  # a sparse model's averages cannot be dropped, and come again
        state.resync.unsound()
    return dropped


def _collect(
    state: Recovery, communicator: Communicator, buckets: Sequence[Bucket], memory: Memory
) -> tuple[list[torch.Tensor], list[Outcome]]:
    """The averages of the next step, in ``memory``, without a contribution of this rank; and what became of its ops."""
    over: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    targets = [
        state.memory_of(bucket.index, bucket.numel, bucket.dtype, bucket.device, memory).targets() for bucket in buckets
    ]
    for bucket, (decoded, _) in zip(buckets, targets, strict=True):
        path = state.paths.of(bucket.device)
        values = path.values(decoded)
        handling = Handling(
            str(bucket.dtype).removeprefix("torch."),
            path.coder(path.stream.mark()),
            bits=state.bits,
            scaled=state.scaler is not None,
            parts=bucket.parts,
            starts=bucket.starts,
        )
        communicator.launch(
            bucket.index, values, values, last=bucket.last, done=over.put, contribute=False, handling=handling
        )
    outcomes = [over.get() for _ in buckets]
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    for bucket, (decoded, result) in zip(buckets, targets, strict=True):
        state.paths.of(bucket.device).stream.join()
        if result is not decoded:
            result.copy_(decoded)
    return [result for _, result in targets], outcomes
