"""Between two steps: keep the own replica equal, hold the others, catch up (clock-16, clock-20, clock-21)."""

from __future__ import annotations

import enum
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tailbound.collective.comeback import Part
from tailbound.collective.communicator import Communicator
from tailbound.collective.op import Outcome
from tailbound.errors import ConfigError, TransportError
from tailbound.torch import catch_up
from tailbound.torch.also import Stateful
from tailbound.torch.collectives import refuse_optimizer
from tailbound.torch.contribution import Contributions
from tailbound.torch.entrance import Entrance, buckets
from tailbound.torch.finished import Layout
from tailbound.torch.memory import Bucket, Memory
from tailbound.torch.paths import Paths
from tailbound.torch.replica import DIGEST, Replica
from tailbound.torch.resync import Resync
from tailbound.torch.scaler import GradScaler, OverflowNotes, adopt, at_work
from tailbound.torch.turns import Turn, Turns
from tailbound.torch.void import Void
from tailbound.transport.steps import STEP_MASK
from tailbound.wire.bits import Bits

log = logging.getLogger("tailbound")

#: States whose replicas are kept equal in this process.
_attached: weakref.WeakSet[Recovery] = weakref.WeakSet()
#: Steps running that a rank may be lost, and not be able to join the others, before training ends with an error.
_LOST_MOST = 10
#: Seconds for one attempt to, until another's state begins to come (it has time by its size then), and for a rank that
#: has come back to enter.
_REJOIN, _ENTER = 30.0, 180.0
#: Why no rank can skip a step alone within DDP's ``join()``.
_JOINED = (
    "within DDP's join() all ranks wait for each other before every forward pass; leave out tailbound.torch.batches, "
    "or leave join() out and give all ranks as many batches"
)
#: Backward passes after which a model that no optimizer has stepped is warned of: more than are accumulated as a rule.
_WITHOUT = 16
#: Seconds that a rank whose program is where the others are waits for one of them to come there.
_PLACE = 10.0
#: In place of a step that has ended: one that a rank outside made by itself, or that was void.
_BY_ITSELF = -1


class Place(enum.Enum):
    """Where a rank is in the job, between two of its steps (``docs/torch/cluster.md`` has the transitions)."""

    IN_STEP = enum.auto()  #: no live rank is known to be further
    BEHIND = enum.auto()  #: others have finished steps whose averages are here
    LOST = enum.auto()  #: others have finished steps whose averages are gone
    VOID = enum.auto()  #: it was lost, and its iterations count for nothing until its program is where the others are
    OUTSIDE = enum.auto()  #: its process is new in a job under way, and makes steps by itself


class Recovery:
    """The part of ``TailboundState`` that is called between two steps, by hand or by hooks on the model.

    Args:
        rank, ranks: of the job.
        resync: ``resync_period`` and ``resync_share`` of ``TailboundState``.

    Raises:
        ConfigError: an invalid value of ``resync``.
    """

    #: digests of its replica are compared with those of other ranks; not where the first rank of its host does that
    _compares = True
    #: who averages other shards of the model agrees with this rank on a loss scale before it holds
    shares_scale = False
    #: None: a world of one
    communicator: Communicator | None = None
    contributions: Contributions
    paths: Paths
    bits: Bits
    memory_of: Callable[[int, int, torch.dtype, torch.device, Memory | None], Bucket]
    applied: Callable[[Outcome, bool], None]
    say: Callable[[str, str], None]

    def __init__(self, rank: int, ranks: int, resync: tuple[int, float]) -> None:
        if min(resync) < 0:
            raise ConfigError("resync_period and resync_share: give 0 or more")
        self.rank, self.ranks = rank, ranks
        self._resync_settings = resync
        self.layout, self.memory = Layout(), Memory()
        #: counters of earlier runs that this one goes on from (``load_state_dict``)
        self.history: list[dict[str, int]] = []
        #: batches still to be skipped (``batches``)
        self.owed_batches = 0
        #: the last loop over ``batches`` that has begun
        self.loop: object = None
        #: keeps the replica equal to the others', once attached to a model
        self.resync: Resync | None = None
        self._handles: list[Any] = []
        #: the step whose last bucket is over, until its boundary; and whether an optimizer has stepped since
        self.ended: int | None = None
        self.stepped = False
        #: optimizers of the model that are within ``step``, by id: a closure may make whole passes there. One that has
        #: raised stays until its next step is made; others then read less often than they could
        self._stepping: set[int] = set()
        self.turns = Turns()
        self._looked_at: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._without = 0  # steps that no optimizer has followed, of a model that none is known of
        self._early = False  # a boundary before the optimizer has stepped has been told of
        self._named = False
        self._preparing = False  # holds the others until the first step is launched
        self._within = 0  # contexts of ``hold``
        self._lost_for = 0  # steps running
        self._new_step = False  # one has ended since it was looked whether this rank is lost
        self._jumped = 0  # passes skipped before a forward pass, which ``catch_up`` is to tell
        self._asked_at: int | None = None  # the step that was half made when a batch was asked for
        self._asked_early = False  # and its optimizer has stepped only then
        #: the program follows the job, by ``batches`` or ``catch_up``
        self.skips = False
        #: where the program's loop is, if it does not
        self.void = Void()
        #: the state is not that of the others yet: take part without contributing (clock-20)
        self.abstaining = False
        #: what the gradients handed to the hook are multiplied by, and the scaler that says so
        self.loss_scale = 1.0
        self.scaler: GradScaler | None = None
        #: jobs that average parts of the same model on this host
        self.shards = 1
        self.overflow = OverflowNotes()
        #: lets ranks in that have come back, or this one; None: no rank can
        self.entrance: Entrance | None = None
        #: why no rank can skip a step alone, and what to do; empty: each can
        self.together = ""
        self._joined = False  # the last forward pass was within DDP's ``join()``
        #: what ends the threads of the job, in order; none of it may hold this object
        self._endings: list[Callable[[], object]] = []
        self._unused = weakref.finalize(self, _end_aside, self._endings)
        self._unused.atexit = False  # communicators end themselves then

    def detach(self) -> None:
        """Lets go of the model. Threads that keep replicas equal end with the communicator."""
        self._unused.detach()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _attached.discard(self)
        if self.scaler is not None:
            self.scaler.close()

    def attach(
        self,
        ddp_model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        also: Mapping[str, Stateful] | None = None,
    ) -> None:
        """Keeps ``ddp_model``'s replica equal to the others' from now on; ``register`` calls it.

        Steps end at the next forward pass of ``ddp_model``. Without ``optimizer``, those that step its parameters are
        found at their first ``step()``. A wrapper around one (Accelerate's) stands for it. ``also``: what else goes
        with a whole state.
        """
        while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            optimizer = inner  # its own step is what hooks see; with the wrapper beside it steps were applied twice
        if optimizer is not None:
            refuse_optimizer(optimizer)
        if self.communicator is None:
            return
        if self.resync is not None:
            raise ConfigError(
                "this TailboundState has a model already: make one TailboundState for each model, or call register "
                "for each"
            )
        module = ddp_model.module if isinstance(ddp_model, DistributedDataParallel) else ddp_model
        replica = Replica(module, least=self.ranks)
        if optimizer is not None and not replica.adopt(optimizer):
            raise ConfigError("the optimizer steps none of the model's parameters: give register the one that does")
        self._tell_of_ring(self.communicator, self._tensors(replica))
        communicator, job, (period, share) = self.communicator, self.communicator.job, self._resync_settings
        itself = weakref.ref(self)
        self.resync = Resync(
            self.communicator.reliable,
            replica,
            self.rank,
            self.ranks,
            lambda: job.membership.alive(job.steps.own),
            period=period,
            share=share,
            compare=self._compares,
            also=also,
            closed=lambda: job.membership.gone,
            inside=lambda: not communicator.elastic or communicator.part != Part.OUTSIDE,
            buckets=partial(buckets, self.layout) if communicator.elastic else lambda: bytes(DIGEST),
            scaler=lambda: held.scaler if (held := itself()) is not None else None,
            abstains=lambda: (held := itself()) is not None and held.abstaining,
        )
        # first of all hooks: FSDP's own gathers the parameters, which a boundary may still change
        self._handles.append(ddp_model.register_forward_pre_hook(WeakHook(self._before_forward), prepend=True))
        if getattr(ddp_model, "static_graph", False):
            self.layout.follow(replica.parameters, _used_by(ddp_model))
        for step_hook in (
            register_optimizer_step_pre_hook(WeakHook(self._before_step)),
            register_optimizer_step_post_hook(WeakHook(self._after_step)),
        ):
            self._handles.append(step_hook)
            self._endings.insert(0, step_hook.remove)
        self.layout.compare(module.parameters())
        if optimizer is not None:
            self._look_at(optimizer)
        if self.communicator.elastic:
            self.entrance = Entrance(self.communicator, self.resync, self.layout)
        _attached.add(self)
        if not self.outside:
            self._prepare(True)

    def _prepare(self, on: bool) -> None:
        """Until its first step is launched a rank holds the others: its first pass may compile for a minute."""
        if self.communicator is not None and on != self._preparing:
            self._preparing = on
            self._hold(on)

    @property
    def place(self) -> Place:
        """Where this rank is."""
        if self.communicator is None:
            return Place.IN_STEP
        if self.outside:
            return Place.OUTSIDE
        if self.void.on:
            return Place.VOID
        if self.communicator.lost:
            return Place.LOST
        return Place.BEHIND if self.communicator.behind else Place.IN_STEP

    @property
    def outside(self) -> bool:
        """Whether this process has come back to a job under way, and makes steps by itself until it enters."""
        return self.entrance is not None and self.entrance.outside

    def begin(self, timeout: float) -> None:
        """Where ranks may come back, DDP runs on each rank by itself: all begin with what rank 0 holds.

        Raises:
            TransportError: not within ``timeout`` seconds.
        """
        if self.entrance is None or self.resync is None or self.communicator is None or self.outside:
            return
        if self.rank:
            self.resync.unsound()
        if not self.synchronise(timeout):
            raise TransportError(
                f"rank {self.rank}: ranks did not take over what rank 0 holds within {timeout:g} s: look at the other "
                "ranks' logs, or raise timeout= (TAILBOUND_TIMEOUT)"
            )
        self.communicator.part = Part.INSIDE

    def note_missing(self, rows: int) -> None:
        """An average has been applied without ``rows`` of its rows."""
        if self.resync is not None:
            self.resync.note_missing(rows)

    def ran_out(self) -> None:
        """DDP averages zeros for this rank, outside of a backward pass: it has no data left (``join``), nor steps."""
        self.note_missing(1)

    def rehearsed(self) -> None:
        """A step that this process made by itself has its gradients."""
        self.stepped, self.ended = False, _BY_ITSELF
        self.turns.passed(inside=bool(self._stepping))

    def _come_in(self) -> None:
        """Between two steps: a rank that is outside enters, as soon as it can."""
        assert self.entrance is not None
        assert self.communicator is not None
        if self.entrance.enter(_ENTER):
            self._preparing = True  # it holds the others since it has entered
            self.forget()
            self.overflow.take()
            # its data are where its own steps have led it
            self._jumped += max(0, self.communicator.step - self.entrance.alone)

    def _tensors(self, replica: Replica) -> tuple[int, ...]:
        """Entries of the tensors that this rank's job averages in a step."""
        return tuple(size for p in replica.parameters if (size := p.numel()))

    def _tell_of_ring(self, communicator: Communicator, tensors: tuple[int, ...]) -> None:
        """Says what the rings take, how many steps of ``tensors`` they hold, and what that allows."""
        rows, held, taken = communicator.rings(tensors)
        log.log(
            logging.INFO if rows <= held else logging.WARNING,
            "rank %d: the rings take %d MiB of memory and hold %.1f steps of this model (%.1f M parameters): a rank "
            "that misses at most %d applies the others' averages, one that misses more takes another's state",
            self.rank,
            taken >> 20,
            held / rows,
            sum(tensors) / 1e6,
            max(0, held // rows - 1),
        )

    @torch.compiler.disable
    def boundary(self) -> None:
        """Between two steps: the last one has been applied, the next one has not begun.

        After ``optimizer.step()``. Where the optimizer is still to step, or has left a step out, the step stays open.
        """
        if not self._half_made:
            self.end_step(still=True)
        elif not self._early:
            self._early = True
            log.info(
                "rank %d: boundary() before the optimizer has stepped does nothing: call it after optimizer.step()",
                self.rank,
            )

    @property
    def _half_made(self) -> bool:
        """Whether the averages of a step have come, and the optimizer is still to step (or leaves the step out)."""
        open_still = self.ended is not None and not self.stepped
        return open_still and self.resync is not None and bool(self.resync.replica.optimizers)

    @torch.compiler.disable
    def _before_forward(self, ddp_model: torch.nn.Module | None = None, *_: object) -> None:
        """Before a forward pass of the model: as a rule the boundary of two steps.

        Not where the optimizer is still to step: a model may be called between ``backward`` and ``step``. Nor where its
        parameters are those of no step.
        """
        self._joined = joined(ddp_model)
        if self.resync is not None and self.resync.moment.changing:
            return
        if self.ended is not None:
            if self._half_made:
                return
            self.end_step(still=True)
        if self._new_step:  # also where the program has called ``boundary`` by itself
            self._new_step = False
            self.rejoin()

    def before_backward(self) -> None:
        """The first average of a step is about to be launched."""
        if self.void.lag > 0 and not self.void.on:
            self._look_around()
        if self.resync is None or (self.resync.replica.optimizers and not self._stepping):
            self.end_step(still=False)
        else:
            # within ``step(closure)`` the update follows this pass; and what an earlier pass of the same ``step`` has
            # ended is followed by one already: nobody is to read in between. Nor where the program makes updates
            # without an optimizer, which nothing announces
            with self.resync.moment.change():
                self.end_step(still=False)
                self.resync.moment.disturb()
        if self.resync is None:  # nobody else looks
            self.rejoin()

    def end_step(self, *, still: bool) -> None:
        """The step whose averages have come is over; ``still``: nothing uses the parameters now, so they may change."""
        half_made = self._half_made
        step, self.ended = self.ended, None
        if step == _BY_ITSELF:
            if still:
                (self._follow if self.void.on else self._come_in)()
            return
        self._new_step |= step is not None
        if step is not None and self.resync is not None:
            self.resync.boundary(step, still=still)
            self._name_what_stays()
            if self.abstaining and self.resync.sound:
                self.abstaining = False
        if still and not half_made and self.entrance is not None and not self.outside:
            self.entrance.admit(held=self._preparing or self._within > 0)

    def _name_what_stays(self) -> None:
        """After the first steps: says what of the optimizers' state cannot be given to another rank."""
        assert self.resync is not None
        if not self.resync.replica.optimizers:
            self._without += 1
            if self._without == _WITHOUT:
                log.warning(
                    "rank %d: no torch.optim.Optimizer has stepped this model in its first %d backward passes: what "
                    "steps it is not known, so a rank that misses something cannot be made equal in it, nor apply what "
                    "the others have averaged. Pass optimizer= to register",
                    self.rank,
                    _WITHOUT,
                )
        if self._named or not any(optimizer.state for optimizer in self.resync.replica.optimizers):
            return
        self._named = True
        try:
            self.resync.replica.describe()
        except ConfigError as error:
            log.warning("rank %d: this rank's state cannot be given to a rank that was away: %s", self.rank, error)

    def rejoin(self) -> None:
        """Between two steps: a rank that is lost joins the others, since nothing but zeros is left for it.

        Raises:
            TransportError: it could not for ``_LOST_MOST`` steps running.
        """
        if self.place is not Place.LOST:
            self._lost_for = 0
        elif self.together or self._joined or self.resync is None or self.skips:  # ``batches`` jumps
            self._count_lost()
        else:
            log.warning(
                "rank %d: is %d steps behind, more than its ring holds. Its iterations are void until its program is "
                "where the others are: tailbound.torch.batches skips them; with hold() the others wait",
                self.rank,
                self.behind,
            )
            self._make_void(self.behind)

    def _count_lost(self) -> None:
        """One more step that this rank could not join the others after.

        Raises:
            TransportError: it was the last of ``_LOST_MOST`` running.
        """
        self._lost_for += 1
        if self._lost_for >= _LOST_MOST:
            raise TransportError(
                f"rank {self.rank}: is {self.behind} steps behind, more than its ring holds, and cannot join the "
                f"others: {self._lost_for} steps running had zeros for gradients. Restart this rank's processes from a "
                "checkpoint. A larger ring_mib bridges longer stops; tailbound.torch.batches skips missed steps"
            )

    def _look_around(self) -> None:
        """The program lags: where no other rank begins this step, it would be that of this rank alone."""
        assert self.resync is not None
        assert self.communicator is not None
        if self.void.waits(self.communicator.begun, self.resync.step_time):
            self._make_void(self.void.lag)

    def _make_void(self, lag: int) -> None:
        assert self.resync is not None
        self.void.begin(lag)
        self.abstaining = True
        self.forget()
        self.resync.unsound()
        self.resync.moment.disturb()

    def _follow(self) -> None:
        """Between two void steps: goes on with the others, once the program is where they are.

        Raises:
            ConfigError: it does not get there, and could join them in the middle of an iteration only.
            TransportError: see ``_count_lost``.
        """
        communicator, void = self.communicator, self.void
        assert communicator is not None
        if not void.patient() and not catch_up.may_join(self, self.behind):
            return
        if void.patient():
            if not void.there(self.behind):
                return
            moved = 0
            if communicator.lost:
                communicator.drain(2)
                try:
                    moved = communicator.jump()
                except TransportError as error:
                    self.say("jump failed", str(error))
                    self._count_lost()
                    return
            more = max(0, -void.lag - moved)
            moved += catch_up.take_state(self, communicator, time.monotonic() + _PLACE, more)
        elif communicator.lost:
            moved = catch_up.jump(self, communicator, _REJOIN)
        else:
            moved = catch_up.take_state(self, communicator, time.monotonic() + _REJOIN)
        void.moved(moved)
        self.turns.split()
        if communicator.lost or (void.on and void.patient()) or not void.whole(self.turns.passes):
            void.on = True
            if communicator.lost and not moved:
                self._count_lost()
            return
        void.on, self._lost_for = False, 0
        if void.lag > 0:
            log.warning(
                "rank %d: goes on with the others; its data and its learning rate are %d steps behind theirs: "
                "tailbound.torch.batches skips as many",
                self.rank,
                void.lag,
            )
        else:
            log.info("rank %d: goes on with the others before step %d", self.rank, communicator.step)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self.resync is not None and self.resync.replica.adopt(optimizer):
            refuse_optimizer(optimizer)
            self._look_at(optimizer)
            self._see_scaler(optimizer)
            self.resync.moment.disturb()
            self.resync.replica.note_rates(optimizer)
            self._stepping.add(id(optimizer))

    def _look_at(self, optimizer: torch.optim.Optimizer) -> None:
        """Says once what else ``optimizer`` steps."""
        if optimizer in self._looked_at:
            return
        self._looked_at.add(optimizer)
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        if beside := sum(p.requires_grad and not self.layout.knows(p) for p in stepped):
            log.warning(
                "rank %d: %s steps %d parameter(s) that are not of this model, too: they are not kept equal with it, "
                "and no rank that was away steps them where it applies what the others have averaged. Give them an "
                "optimizer of their own, or wrap them in the same DistributedDataParallel",
                self.rank,
                type(optimizer).__name__,
                beside,
            )

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """The step is made only now: a closure may have averaged in it, before the update."""
        if self.resync is not None and any(optimizer is known for known in self.resync.replica.optimizers):
            self._stepping.discard(id(optimizer))
            self.turns.note(optimizer, begins=not self.stepped)
            self.stepped = True
            self._asked_early |= self.ended is not None and self._asked_at == self.ended

    def _see_scaler(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes in a scaler of torch's own that is stepping ``optimizer``, so that ranks agree on its scale."""
        scaler = at_work()
        if scaler is None or scaler is self.scaler or not scaler.is_enabled():
            return
        adopt(self, scaler)
        log.info("rank %d: a torch.amp.GradScaler steps this model; it sees this rank's overflows now", self.rank)
        if self.overflow.so_far.void:  # finite gradients: zeros, since all ranks overflowed; it would not step by them
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def synchronise(self, timeout: float = 30.0) -> bool:
        """Makes all replicas equal to the bit, between two steps: before a checkpoint, or at the end.

        To be called on all ranks after the same step, and after ``optimizer.step()``: before that ranks are made equal
        as they are there, and none comes in. Each waits until the others have come, and all compare digests of
        parameters, of what the optimizers keep, and of buffers. Who holds something else takes, point to point, what
        most of the ranks hold that have missed nothing. Training, or ``close``, may follow at once.

        Args:
            timeout: seconds to wait, for the slowest rank and for what has to be taken.

        Returns:
            Whether every rank that has not died answered, these are a majority, and all of them are equal. False if a
            rank did not come within half of ``timeout``, has closed, or has gone on without synchronising; those that
            came are equal then, as far as time allowed. False for a rank that has come back and is still ``outside``.
            The log says who was compared.
        """
        half_made, ended = self._half_made, self.ended
        if half_made and self.place in (Place.OUTSIDE, Place.VOID):
            return False
        self.end_step(still=True)
        if self.resync is None or self.communicator is None:
            return True
        if self.place in (Place.OUTSIDE, Place.VOID):
            return False
        if self.resync.moment.step is None:  # as all have begun
            self.resync.moment.settle(self.communicator.step - 1 & STEP_MASK)
        well = self.resync.synchronise(timeout)
        if half_made:  # nobody may take this for the state after the step
            self.ended = ended
            self.resync.moment.disturb()
        if self.resync.sound:
            self.abstaining = False
        return well

    def hold(self, *, changes: bool = False) -> AbstractContextManager[None]:
        """Within the context the others wait for this rank (a checkpoint, an evaluation) and leave it out of nothing.

        For as long as ``hold_max`` at most (clock-16). Anywhere between two averages, also between ``backward`` and
        ``optimizer.step()``: the step stays open then.

        Args:
            changes: the weights are others within (their averages, which are evaluated, say), and are put back before
                the end. No rank takes this one's state meanwhile, and this one joins the others after it.
        """
        return self._holding(ends_step=True, changes=changes)

    @contextmanager
    def _holding(self, *, ends_step: bool, changes: bool) -> Iterator[None]:
        if self.communicator is None:
            yield
            return
        if ends_step and not self._half_made:
            self.end_step(still=True)
        self._hold(True)
        self._within += 1
        unread: AbstractContextManager[None] = nullcontext()
        if changes and self.resync is not None:
            unread = self.resync.moment.change()
        try:
            with unread:
                yield
        finally:
            self._within -= 1
            if not self._preparing and not self._within:
                self._hold(False)

    def _hold(self, on: bool) -> None:
        """Tells the others that this rank holds, or no longer."""
        if self.communicator is not None:
            self.communicator.hold(on)

    @property
    def behind(self) -> int:
        """Steps that the others have finished and this rank has not (clock-20)."""
        return self.communicator.behind if self.communicator is not None else 0

    def between_iterations(self) -> bool:
        """Whether the last pass is through, for whoever takes the next batch: no optimizer is still to step.

        Raises:
            ConfigError: it was asked before, and the optimizer has stepped only then.
        """
        if self._asked_early:
            raise ConfigError(
                "tailbound.torch.batches was asked for a batch between backward() and optimizer.step(), where no step "
                "can be applied: ask for it after the step. What reads ahead belongs inside, as in "
                "batches(prefetch(loader), state)"
            )
        self._asked_at = self.ended if self._half_made else None
        return self._asked_at is None

    def catch_up(self, step: Callable[[], object] | None = None) -> tuple[int, int]:
        """Between two iterations: applies those that the others have finished, without computing them.

        An iteration is what the training loop makes of one step of its data: one backward pass, as a rule, and the
        optimizer's step. One of several passes is learned from the last ones, and applied as a whole. Where the
        averages are gone, this rank joins the others at their next step and takes another rank's state.

        Args:
            step: called once for each applied iteration when the averages are in ``.grad``, instead of its last
                ``optimizer.step()``: whatever the training loop does between ``backward`` and the next iteration
                (clipping, the scheduler). Default: ``step()`` of the optimizers whose turn it is, through the gradient
                scaler if there is one.

        Returns:
            How many iterations were applied, and how many were skipped since the last call.

        Raises:
            ConfigError: no optimizer is known, it is still to step, or no rank can skip a step alone (``together``).
            TailboundError: see ``allreduce_hook``.
        """
        if why := self.together or (_JOINED if self._joined else ""):
            raise ConfigError(f"no rank can skip a step alone: {why}")
        self.skips = not self.void.on
        if self.communicator is None:
            return 0, 0
        if self._half_made:
            if self.place in (Place.BEHIND, Place.LOST):
                raise ConfigError(
                    f"rank {self.rank}: catch_up() between backward() and optimizer.step(), {self.behind} steps "
                    "behind: the averages of the last step would be lost. Move the call behind optimizer.step(); where "
                    "the program leaves a step out, behind the next one"
                )
            return 0, 0
        self.end_step(still=True)
        applied, (skipped, self._jumped) = 0, (self._jumped, 0)
        if not self.outside:
            self.turns.split()
        if self.place is Place.LOST:
            skipped += catch_up.jump(self, self.communicator, _REJOIN)

        def act(turn: Turn | None, last: bool) -> None:
            if step is not None and last:
                step()
            else:
                catch_up.step_optimizers(self, turn)

        if self.place is Place.BEHIND:
            applied, more = catch_up.apply_finished(self, self.communicator, act)
            skipped += more
        return applied, self.turns.iterations(skipped)

    def forget(self) -> None:
        """Drops what is kept for the next step: the parameters are others now."""
        self.contributions.forget()


def attached() -> list[Recovery]:
    """The states of all registered models of this process that are not closed."""
    return list(_attached)


class WeakHook:
    """A hook that does not keep the object of ``method``. In a copy of a model it does nothing."""

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        self._held = weakref.WeakMethod(method) if method is not None else None

    @torch.compiler.disable
    def __call__(self, *arguments: Any) -> None:
        """As ``method``, while its object is there."""
        if self._held is not None and (found := self._held()) is not None:
            found(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return WeakHook, ()


def joined(ddp_model: torch.nn.Module | None) -> bool:
    """Whether a forward pass of ``ddp_model`` is within DDP's ``join()``."""
    return bool(getattr(getattr(ddp_model, "_join_config", None), "enable", False))


def _used_by(ddp_model: torch.nn.Module) -> Callable[[], torch.Tensor | None]:
    """Asks DDP how many ranks use each of its parameters, and does not keep it; None: there is no such model."""
    held = weakref.ref(ddp_model)

    def used() -> torch.Tensor | None:
        found = held()
        return found.reducer._get_local_used_map() if isinstance(found, DistributedDataParallel) else None

    return used


def _end_aside(endings: list[Callable[[], object]]) -> None:
    """Ends a job that nobody can use any more, in a thread of its own: what dropped it may be one of the job's."""
    if endings:
        threading.Thread(target=lambda: [end() for end in endings], name="tailbound-end", daemon=True).start()
