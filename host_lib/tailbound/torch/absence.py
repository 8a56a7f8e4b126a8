"""A rank that was away comes back to where the others are: by their averages, or by the state of one (clock-20).

A rank whose averages are gone *jumps*: it joins the others in their step, and takes the state of another. Only
``batches`` can leave iterations out. Without it the program would be behind its state, with the learning rate of an
earlier step, and go on by itself where the others are through. So its iterations are *void* until it is where the job
is. Schedulers get there by themselves. The state of another rank is taken at the end.
"""

from __future__ import annotations

import enum
import inspect
import logging
import queue
import time
from collections.abc import Callable, Sequence

import torch

from tailbound.collective.communicator import Communicator
from tailbound.collective.op import Outcome
from tailbound.errors import ConfigError, TransportError
from tailbound.torch.finished import Bucket, gradients
from tailbound.torch.memory import Memory
from tailbound.torch.scaler import TailboundState
from tailbound.torch.steps import Part, Turn
from tailbound.transport.steps import STEP_MASK, step_distance, step_of

log = logging.getLogger("tailbound")

#: Steps running that a rank may be lost, and not be able to join the others, before training ends with an error.
_LOST_MOST = 10
#: The same while iterations seem to differ: a loop's last one often does, and soon is forgotten.
_STUCK = 24
#: A rank that is lost again while it takes the others' state jumps so often. The last time it takes none, since that
#: takes longer than its ring lasts: it is not lost then, and takes a slice a step.
_JUMPS = 3
#: Seconds until another's state begins to come (it has time by its size then): after a jump, where averages are gone,
#: and where the program is where the others are, so that one of them has to come there.
_REJOIN, _PATIENCE, _PLACE = 30.0, 10.0, 10.0
#: Void iterations until a program that does not get there goes on with the job: so many times its first lag, and more.
_VOID, _VOID_MORE = 4, 16
#: So often another's state is taken for nothing, since the job has moved on meanwhile.
_TRIES = 3
#: Seconds that a rank which lags waits at least until another one begins its step, and in median steps.
_BEGIN, _BEGIN_STEPS = 0.1, 2.0
#: An advice for a loop whose iterations differ.
_DIFFERING = (
    "Iterations of this loop differ in their backward passes, or an optimizer makes several in one step: give every "
    "iteration of tailbound.torch.batches the same passes (all that belong to one step of the slowest optimizer, say), "
    "and accumulate within no_sync()"
)
#: Why no rank can skip a step alone within DDP's ``join()``.
_JOINED = (
    "within DDP's join() all ranks wait for each other before every forward pass; leave out tailbound.torch.batches, "
    "or leave join() out and give all ranks as many batches"
)


class Place(enum.Enum):
    """Where a rank is in the job, between two of its steps (``docs/torch/failures.md`` has the transitions)."""

    IN_STEP = enum.auto()  #: no live rank is known to be further
    BEHIND = enum.auto()  #: others have finished steps whose averages are here
    LOST = enum.auto()  #: others have finished steps whose averages are gone
    VOID = enum.auto()  #: it was lost, and its iterations count for nothing until its program is where the others are
    OUTSIDE = enum.auto()  #: its process is new in a job under way, and makes steps by itself


class Absence(Part):
    """Of the rank of ``state``. Steps are backward passes whose gradients are averaged."""

    def __init__(self, state: TailboundState) -> None:
        super().__init__(state)
        self.abstaining = False  #: the state is not that of the others yet: take part without contributing.
        self.void = False  #: the present step is void.
        self.lag = 0  #: steps of the job before this rank's next one that the loop lacks; below zero: it has made more.
        self.skips = False  #: the program follows the job, by ``batches`` or ``catch_up``.
        self.skipped = 0  #: steps skipped before a forward pass, of which ``catch_up`` is to tell.
        self.joined = False  #: the last forward pass was within DDP's ``join()``.
        self._made = self._most = self._tries = 0  # of this stretch of void iterations
        self._lost_for = 0

    @property
    def place(self) -> Place:
        """Where this rank is."""
        communicator = self._state.communicator
        if communicator is None:
            return Place.IN_STEP
        if self._state.outside:
            return Place.OUTSIDE
        if self.void:
            return Place.VOID
        if communicator.lost:
            return Place.LOST
        return Place.BEHIND if communicator.behind else Place.IN_STEP

    @property
    def _job(self) -> Communicator:
        communicator: Communicator | None = self._state.communicator
        assert communicator is not None
        return communicator

    # -- a loop that skips no batches

    def rejoin(self) -> None:
        """See ``TailboundState.rejoin``."""
        state = self._state
        if self.place is not Place.LOST:
            self._lost_for = 0
        elif state.together or self.joined or state.resync is None or self.skips:  # ``batches`` jumps
            self._count_lost()
        else:
            log.warning(
                "rank %d: is %d steps behind, more than its ring holds. Its iterations are void until its program is "
                "where the others are: tailbound.torch.batches skips them; with hold() the others wait",
                state.rank,
                state.behind,
            )
            self._begin_void(state.behind)

    def _count_lost(self) -> None:
        """One more step that this rank could not join the others after."""
        self._lost_for += 1
        known = self._state.steps.passes
        if self._lost_for >= (_LOST_MOST if known else _STUCK):
            advice = "A larger ring_mib bridges longer stops; tailbound.torch.batches skips missed steps"
            raise TransportError(
                f"rank {self._state.rank}: is {self._state.behind} steps behind, more than its ring holds, and cannot "
                f"join the others: {self._lost_for} steps running had zeros for gradients. Restart this rank's "
                f"processes from a checkpoint. {advice if known else _DIFFERING}"
            )

    def before_backward(self) -> None:
        """A program that lags makes a void step where no other rank begins this one: it would be its own alone."""
        if self.lag <= 0 or self.void:
            return
        until = time.monotonic() + max(_BEGIN, _BEGIN_STEPS * self._state.resync.step_time)
        while not self._job.begun():
            if time.monotonic() >= until:
                self._begin_void(self.lag)
                return
            time.sleep(0.001)

    def _begin_void(self, lag: int) -> None:
        """Steps are void from now on, since the loop lags so many behind the others."""
        self.void, self._made, self._tries = True, 0, 0
        self._most = _VOID * lag + _VOID_MORE
        self._part()
        self._state.resync.moment.disturb()

    def _part(self) -> None:
        """This rank's state is not that of the others any more."""
        self.abstaining = True
        self._state.memory.forget()
        if self._state.resync is not None:
            self._state.resync.part()

    def made(self) -> None:
        """A void step has its gradients."""
        self.lag -= 1
        self._made += 1

    def follow(self, *, met: bool = False) -> None:
        """Between two void steps: goes on with the others, once the program is where they are.

        ``met``: all are to synchronize now, after the last step that each program has made.
        """
        behind = self._state.behind
        if self._patient:
            # the loop is where the others will be at the end of the step that the newest of them has begun
            if -self.lag <= behind and not self.lag == behind == 0 and not met:
                return
        elif not self._state.steps.passes:  # which pass of an iteration the others are in
            self._count_lost()
            return
        moved = 0
        if self._patient:
            moved = self._jump() if self._job.lost else 0
            if moved or not self._job.lost:
                moved += self.take_state(time.monotonic() + _PLACE, max(0, -self.lag - moved))
        elif self._job.lost:
            moved = self.jump(_REJOIN)
        else:
            moved = self.take_state(time.monotonic() + _REJOIN)
        if self._job.lost and not moved:
            self._count_lost()
            return
        self.lag += moved
        self._tries += 1
        self._state.steps.split()
        passes = self._state.steps.passes
        whole = self.lag % passes == 0 if passes else self.lag == 0
        self.void = bool(self._job.lost or not whole or (self.lag and self._patient))
        if self.void:
            self._part()  # what has come is not kept: the iterations up to there go on changing it
            return
        self._lost_for = 0
        if self.lag > 0:
            log.warning(
                "rank %d: goes on with the others; its data and its learning rate are %d steps behind theirs: "
                "tailbound.torch.batches skips as many",
                self._state.rank,
                self.lag,
            )
        else:
            log.info("rank %d: goes on with the others before step %d", self._state.rank, self._job.step)

    @property
    def _patient(self) -> bool:
        """Whether more void steps may help."""
        return self._made < self._most and self._tries < _TRIES

    # -- a loop that skips batches

    def catch_up(self, step: Callable[[], object] | None) -> tuple[int, int]:
        """See ``TailboundState.catch_up``."""
        state = self._state
        if why := state.together or (_JOINED if self.joined else ""):
            raise ConfigError(f"no rank can skip a step alone: {why}")
        self.skips = not self.void
        if state.communicator is None:
            return 0, 0
        if state.steps.half_made:
            if self.place in (Place.BEHIND, Place.LOST):
                raise ConfigError(
                    f"rank {state.rank}: catch_up() between backward() and optimizer.step(), {state.behind} steps "
                    "behind: the averages of the last step would be lost. Move the call behind optimizer.step(); where "
                    "the program leaves a step out, behind the next one"
                )
            return 0, 0
        state.end_step(still=True)
        applied, (skipped, self.skipped) = 0, (self.skipped, 0)
        if not state.outside:
            state.steps.split()
        if self.place is Place.LOST:
            skipped += self.jump(_REJOIN)
        if self.place is Place.BEHIND:
            applied, more = self._apply_finished(step)
            skipped += more
        return applied, state.steps.iterations(skipped)

    def _apply_finished(self, step: Callable[[], object] | None) -> tuple[int, int]:
        """Applies finished iterations, which end by ``step``, while this rank is behind by whole ones.

        Returns:
            How many iterations were applied, and how many passes were skipped by another's state, as their averages
            were gone (the owner map changed while this rank was away, say).
        """
        state, job, applied, memory = self._state, self._job, 0, Memory()
        if not state.layout.ready:
            return 0, 0
        while (iteration := state.steps.iteration()) and job.behind >= len(iteration) and not job.lost:
            for number in range(len(iteration)):
                if not self._apply(iteration, number, step, memory):
                    skipped = number + 1 + self.take_state(time.monotonic() + _PATIENCE)
                    return applied, skipped + self._finish(skipped, step)
            applied += 1
        if not iteration and job.behind > 0:
            state.say(
                "no iteration",
                f"is {job.behind} backward passes behind, and cannot apply what the others have averaged: "
                "iterations differ in their passes, or an optimizer makes several in one step",
            )
        return applied, 0

    def _apply(
        self, iteration: Sequence[Turn | None], number: int, step: Callable[[], object] | None, memory: Memory
    ) -> bool:
        """Applies the averages of the next pass, ``number`` of ``iteration``; False: they are gone.

        Where no optimizer follows the pass they are dropped: the gradients of the pass that one does follow have all
        that counts, unless the program neither adds them up in ``.grad`` nor clears it in between. So such a rank is
        made equal slice by slice.
        """
        state, turn, buckets = self._state, iteration[number], self._state.layout.step()
        averages, outcomes = self._collect(buckets, memory)
        if any(outcome.missed > outcome.expected // 2 for outcome in outcomes) and state.resync is not None:
            state.resync.unsound()
            self.abstaining = True
            return False
        for average in averages:
            average.mul_(state.loss_scale)
        ended = step_of(outcomes[-1].label)
        own = state.rank in self._job.job.sequence.map_at(ended).owners
        if state.resync is not None and (own or turn == ()):
            state.resync.unsound()  # of own rows: they came too late for the others
        for bucket, outcome in zip(buckets, outcomes, strict=True):
            state.applied(outcome, bucket.last)
        if turn != ():
            # what is in no bucket of this model is not to be stepped by the gradient of another step
            stepped = (p for one in state.optimizers for group in one.param_groups for p in group["params"])
            with gradients(buckets, averages, state.layout.unused(), stepped):
                if step is not None and all(later == () for later in iteration[number + 1 :]):
                    step()
                else:
                    step_optimizers(state, turn)
            self._job.job.counters["steps_applied"] += 1
        state.end_step(still=turn != ())
        return True

    def _finish(self, moved: int, step: Callable[[], object] | None = None) -> int:
        """Goes on to where the program is in its iteration, after a move by so many passes; returns how many more."""
        iteration, memory, more = self._state.steps.iteration(), Memory(), 0
        while iteration and self._state.layout.ready and (moved + more) % len(iteration):
            self._apply(iteration, (moved + more) % len(iteration), step, memory)
            more += 1
        return more

    # -- by the state of another rank

    def _jump(self) -> int:
        """Joins the others in their step, without their state; 0: this rank is not lost, or no rank says where."""
        self._job.drain(2)
        try:
            skipped = self._job.jump()
        except TransportError as error:
            self._state.say("jump failed", str(error))
            return 0
        if skipped:
            self._part()
        return skipped

    def jump(self, timeout: float) -> int:
        """Joins the others in their step and takes their state; returns how many steps this rank has moved on.

        ``timeout``: seconds until a state begins to come; it has time by its size then.
        """
        state, until, moved = self._state, time.monotonic() + timeout, 0
        if not (state.layout.settled and state.steps.passes):  # else it would meet another pass of theirs
            return 0
        for number in range(1, _JUMPS + 1):
            if not self._job.lost or not (skipped := self._jump()):
                break
            moved += skipped
            if number < _JUMPS:
                moved += self.take_state(until)
            else:
                words = "is lost again by when another's state has come; abstains until it has it, in slices"
                state.say("no state", words)
        if moved:
            moved += self._finish(moved)
            state.say("jumped", f"was away for too long and has skipped {moved} steps")
        return moved

    def take_state(self, until: float, more: int = 0) -> int:
        """Takes the state of another rank as it is ``more`` steps after the one before the next one here, or later.

        In the latter case the steps in between are taken part in, without rows, and their averages dropped.

        Returns:
            How many those were. The rank goes on abstaining if no state began to come until ``until`` (monotonic
            seconds; those that its size costs come on top), or not all of it did.
        """
        state, job = self._state, self._job
        if state.resync is None:
            return 0
        stands = state.resync.adopt_any(job.step - 1 + more & STEP_MASK, until - time.monotonic())
        if stands is None:
            state.say("no state", "no rank gave a state to continue from; this rank abstains until one does")
            return 0
        state.memory.forget()
        dropped, memory = 0, Memory()
        while (buckets := state.layout.step()) and step_distance(stands, job.step) >= 0:
            self._collect(buckets, memory)
            dropped += 1
        state.steps.ended = None
        self.abstaining = step_distance(stands, job.step) >= 0
        if self.abstaining:  # a sparse model's averages cannot be dropped, and come again
            state.resync.unsound()
        return dropped

    def _collect(self, buckets: Sequence[Bucket], memory: Memory) -> tuple[list[torch.Tensor], list[Outcome]]:
        """Averages of the next step, in ``memory``, without a contribution of this rank; and what became of its ops."""
        state, over = self._state, queue.SimpleQueue[Outcome]()
        results = [memory.part(b.index, "result", b.numel, b.dtype, b.device) for b in buckets]
        targets = [state.decoded(b.index, result, memory) for b, result in zip(buckets, results, strict=True)]
        for bucket, decoded, result in zip(buckets, targets, results, strict=True):
            state.launch(bucket.index, result, decoded, decoded, over.put, bucket.last)
        outcomes = [over.get() for _ in buckets]
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        for bucket, decoded, result in zip(buckets, targets, results, strict=True):
            state.paths.of(bucket.device).stream.join()
            if result is not decoded:
                result.copy_(decoded)
        return results, outcomes


def step_optimizers(state: TailboundState, turn: Turn | None = None) -> None:
    """``step()`` of the model's optimizers of ``turn``, or of those whose turn it is, by the scaler if there is one."""
    due = state.steps.due(state.optimizers, turn)
    if not due:
        raise ConfigError("no optimizer is known: pass optimizer= to register")
    for one in due:
        if state.scaler is not None:
            state.scaler.step(one)
            continue
        closure = inspect.signature(one.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:  # LBFGS: one that makes no pass
            one.step(lambda: 0.0)
        else:
            one.step()
    if state.scaler is not None:
        state.scaler.update()
