"""State of the DDP communication hook: averages the buckets of a model, and keeps its replica equal to the others'.

What a step is made of, and what a rank does that was away, are parts of it (``steps``, ``absence``, ``resync``).
"""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tailbound.codec.format import FORMATS
from tailbound.collective import report
from tailbound.collective.comeback import Part
from tailbound.collective.communicator import Communicator, Handling
from tailbound.collective.op import Outcome
from tailbound.errors import ConfigError, TailboundError, TransportError
from tailbound.settings.table import Options, config_fields, described, filled
from tailbound.torch.absence import Absence, Place
from tailbound.torch.compat import RefusedJoin, default_group, default_store, joined, used_by
from tailbound.torch.complaints import Complaints
from tailbound.torch.elastic import is_elastic
from tailbound.torch.entrance import Entrance
from tailbound.torch.finished import Layout
from tailbound.torch.kept import Stateful
from tailbound.torch.memory import Memory, check
from tailbound.torch.node import own_interface
from tailbound.torch.paths import Paths
from tailbound.torch.replica import Replica
from tailbound.torch.resync import Resync
from tailbound.torch.scaler import GradScaler
from tailbound.torch.steps import BY_ITSELF, Steps, refuse_optimizer
from tailbound.transport.config import DEADLINE_MOST, MS, Config
from tailbound.transport.steps import STEP_MASK, step_of
from tailbound.wire.bits import Bits, as_bits, both_ways

log = logging.getLogger("tailbound")

#: Of the layout of ``state_dict``, and counters of a run that it keeps (``stats()["counters"]``).
FORMAT = 1
_KEPT = ("ops", "ops_incomplete", "ops_late", "rows_expected", "rows_delivered", "abstained", "steps_applied")
#: Jobs made so far by members of a group: all of them agree on the number, other processes need not.
_jobs: Counter[str] = Counter()
#: Passes of which no error feedback is kept: DDP builds its buckets anew after the first one or, with a static graph,
#: after the second, and as many entries may then mean other parameters.
_UNSETTLED = 2
#: States whose replicas are kept equal in this process.
_attached: weakref.WeakSet[TailboundState] = weakref.WeakSet()
#: Seconds for a rank that has come back to enter.
_ENTER = 180.0
#: Why ranks that may come back cannot be joined.
_JOINLESS = (
    "where ranks may come back, no rank knows that another one ran out of data: leave join() out, and give all ranks "
    "as many batches"
)


class TailboundState:
    """What ``allreduce_hook`` needs; make it with ``register`` or by hand before ``register_comm_hook``.

    Args:
        process_group: the group of the DDP model; its store is the rendezvous. Default: the default group.
        model: digest of what is trained (``model_digest``); ranks that differ are refused.
        entries: parameters that are averaged in a step; 0: not known.
        **options: below. All but ``interface`` are the same on all ranks. One that is left out comes from its variable,
            ``TAILBOUND_...``, or has its default.

    Raises:
        ConfigError, CapabilityError, AttachError, LayoutError, TransportError: before any training step.
    """

    communicator: Communicator | None = None  #: None: a world of one.
    detached = False  #: the model is DDP's own again (``detach``).
    shares_scale = False  #: ranks of a host average shards of the same gradients, and tell each other of overflows.
    _compares = True  # digests of its replica with other ranks; of several ranks of a host the first one does.
    _takes = False  # the first rank of this host may change its replica at the next boundary, and then the others'.
    _of_ddp = True  # the model has an all-reduce of its own.
    _joinless = ""  # why DDP's ``join()`` is refused; empty: it is not.

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        model: str = "",
        entries: int = 0,
        **options: Unpack[Options],
    ) -> None:
        given = filled(options)
        deadline_ms, switch, datapath = given["deadline_ms"], given["switch"], given["datapath"]
        if not dist.is_initialized():
            raise ConfigError("call torch.distributed.init_process_group before tailbound: its store is the rendezvous")
        group = process_group or default_group()
        if deadline_ms and deadline_ms[0] * MS > DEADLINE_MOST:
            raise ConfigError(f"deadline_ms begins with {deadline_ms[0]:g}: give {DEADLINE_MOST / MS:g} ms at most")
        if is_elastic(group) and switch:
            raise ConfigError("no rank that has died comes back with a switch: use none, or init_process_group")
        options_of_it = given["bits"], given["error_feedback"], given["resync_period"], given["resync_share"]
        self._set_up(dist.get_rank(group), dist.get_world_size(group), *options_of_it)
        config = Config(
            rank=self.rank,
            ranks=self.ranks,
            # bytes of the ring that a step takes: rows of 4 bits fill half of theirs
            step=entries * both_ways(self.bits)[1] // 8 if given["ring_mib"] is None else 0,
            deadline_1=int(deadline_ms[0] * MS) if deadline_ms else 0,
            deadline_2=int(deadline_ms[1] * MS) if deadline_ms else 0,
            switch=switch if self.ranks > 1 else None,
            **config_fields({**given, "bits": self.bits}),
        )
        agreed = {"error_feedback": "on" if self._feedback else "off", "resync_period": str(given["resync_period"])}
        members = f"{group.group_name}/{'-'.join(map(str, dist.get_process_group_ranks(group)))}"
        name = f"tailbound/{members}/{_jobs[members]}"
        _jobs[members] += 1
        self.everyone = group  # whose gradients are averaged, in whatever way
        if self.ranks > 1:
            interface, datapath = own_interface(given["interface"], datapath)
            self.communicator = Communicator(
                default_store(),
                config,
                datapath=datapath,
                interface=interface,
                name=name,
                timeout=given["timeout"],
                model=model,
                options=agreed,
                elastic=is_elastic(group),
                on_thread=lambda: torch.set_num_threads(1),
            )
            self._endings.append(partial(self.communicator.close, farewell=False))
            log.info("rank %d of %d: tailbound over %s", self.rank, self.ranks, self.communicator.datapath)

    def _set_up(
        self, rank: int, ranks: int, bits: Bits = 8, feedback: bool | None = None, period: int = 0, share: float = 0.0
    ) -> None:
        """What does not need a job."""
        self.rank, self.ranks, self.bits = rank, ranks, bits
        self._resync_settings = period, share
        self._feedback = FORMATS[both_ways(self.bits)[0]].clips if feedback is None else feedback
        self._handed = 0  # passes whose gradients have been handed over
        self.layout, self.memory, self.paths = Layout(), Memory(), Paths()
        self.steps, self.absence = Steps(self), Absence(self)
        self._complaints = Complaints(rank)
        self.complain, self.say = self._complaints.complain, self._complaints.say
        self.last = Outcome()
        self.history: list[dict[str, int]] = []  #: counters of earlier runs that this one goes on from.
        self.owed_batches, self.loop = 0, object()  #: batches still to be skipped, and the last loop of ``batches``.
        self.resync: Resync | None = None  #: keeps the replica equal to the others', once attached to a model.
        self.entrance: Entrance | None = None  #: lets ranks in that have come back, or this one; None: no rank can.
        self.together = ""  #: why no rank can skip a step alone, and what to do; empty: each can.
        self.loss_scale = 1.0  #: what the gradients handed to the hook are multiplied by.
        self.scaler: GradScaler | None = None  #: which says so.
        self.overflowed = False  #: a gradient of some rank had Inf or NaN, in the iteration under way.
        self.shards = 1  #: jobs that average parts of the same model on this host.
        self._preparing = False  # holds the others until the first step is launched.
        self._within = 0  # contexts of ``hold``.
        self._new_step = False  # one has ended since it was looked whether this rank is lost.
        self._handles: list[Any] = []
        #: what ends the threads of the job, in order; none of it may hold this object
        self._endings: list[Callable[[], object]] = []
        self._unused = weakref.finalize(self, _end_aside, self._endings)
        self._unused.atexit = False  # communicators end themselves then.

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Those that step the model, as far as is known."""
        return self.resync.replica.optimizers if self.resync is not None else ()

    def average(self, index: int, tensor: torch.Tensor, last: bool) -> torch.futures.Future[torch.Tensor]:
        """Starts averaging one bucket; the future completes in bounded time, and raises as ``allreduce_hook``.

        It completes with ``tensor`` itself, averaged in place and never written afterwards.
        """
        check(index, tensor)
        if index == 0:
            self.before_backward()
        if last and self.resync is not None and self.steps.shared:
            self.resync.moment.disturb()  # SAM moves the weights after each pass, and no optimizer tells of it
        return self._average(index, tensor, last)

    @property
    def bits(self) -> Bits:
        """Of a code, from the next step on; the same on all ranks."""
        return self._bits

    @bits.setter
    def bits(self, given: Bits) -> None:
        self._bits = as_bits(given)

    def _average(self, index: int, tensor: torch.Tensor, last: bool) -> torch.futures.Future[torch.Tensor]:
        path = self.paths.of(tensor.device)
        future = path.stream.future()
        if self.communicator is None:
            future.set_result(tensor)
            return future
        if self.outside or self.absence.void:
            if self.absence.void:
                tensor.detach().zero_()
                if last:
                    self.absence.made()
            future.set_result(tensor)
            if last:
                self.steps.averaged(BY_ITSELF)
                self.steps.passed()
            return future
        scale, result = self.loss_scale, tensor.detach()
        decoded = self.decoded(index, result, self.memory)
        feedback = self._feedback and self._handed >= _UNSETTLED
        self._handed += last
        direct = decoded.dtype == result.dtype
        source, prepare, residual = self.memory.contribution(index, result, 1 / scale, direct=direct, feedback=feedback)
        if last:
            self._prepare(False)
        errors: list[TailboundError] = []

        def done(outcome: Outcome) -> None:
            if outcome.error is not None:
                errors.append(outcome.error)
            if scale != 1.0:
                decoded.mul_(scale)
            if result is not decoded:
                result.copy_(decoded)
            self.applied(outcome, last)
            if last:
                self.steps.passed()
            future.set_result(result)

        def complete(outcome: Outcome) -> None:
            # a future that never completes would hang DDP, and what a failed device refuses may be anything in here
            try:
                path.within(done)(outcome)
            except Exception as error:
                text = f"rank {self.rank}: the average of bucket {index} cannot be handed over on {tensor.device}"
                advice = "look at what the device said first, then restart all ranks"
                errors.append(TransportError(f"{text}: {error}; {advice}"))
                if not future.done():
                    try:
                        future.set_result(result)  # and ``checked`` raises: an error known before, not after it
                    except Exception:
                        future.set_exception(errors[0])  # type: ignore[arg-type]
                raise

        to_come = not self.absence.abstaining, prepare, residual
        self.launch(index, result, source, decoded, complete, last, *to_come)

        def checked(completed: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            # raising here, after completion, reaches backward() with this message; set_exception would not
            if errors:
                raise errors[0]
            return completed.value()  # or its own error

        return future.then(checked)

    def launch(
        self,
        index: int,
        result: torch.Tensor,
        source: torch.Tensor,
        decoded: torch.Tensor,
        done: Callable[[Outcome], None],
        last: bool,
        contribute: bool = False,
        prepare: Callable[[], None] | None = None,
        residual: torch.Tensor | None = None,
    ) -> None:
        """Has the average of bucket ``index``, which DDP has as ``result``, decoded to ``decoded``.

        ``source``, ``prepare``, ``residual``: of ``Memory.contribution``, if this rank is to ``contribute``.
        """
        path = self.paths.of(result.device)
        mark = path.stream.mark()
        if not result.numel():  # of empty parameters, say: an op has to end the step all the same
            source, decoded, residual = source.new_zeros(1), decoded.new_zeros(1), None
        handling = Handling(
            str(result.dtype).removeprefix("torch."),
            path.coder(mark),
            path.values(residual) if residual is not None else None,
            self.bits,
            self.scaler is not None,
            self.layout.starts(index, result.numel()),
            self.layout.parts(index),
        )
        before = path.within(prepare, mark) if prepare is not None else None
        values = path.values(source), path.values(decoded)
        assert self.communicator is not None
        self.communicator.launch(
            index, *values, last=last, done=done, prepare=before, contribute=contribute, handling=handling
        )

    def applied(self, outcome: Outcome, last: bool) -> None:
        """An average is handed out to be applied; ``last``: it ends the step."""
        self.note(outcome)
        self.steps.came(void=outcome.minority or outcome.skipped or outcome.void)
        if last:
            self.steps.averaged(step_of(outcome.label))

    def decoded(self, index: int, result: torch.Tensor, memory: Memory) -> torch.Tensor:
        """What the average for ``result`` is decoded to: itself, or float32 where its type or a loss scale asks so."""
        native = result.dtype in self.paths.of(result.device).native and self.loss_scale == 1.0
        if native or result.dtype == torch.float32:
            return result
        return memory.part(index, "decoded", result.numel(), torch.float32, result.device)

    def attach(
        self,
        ddp_model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        extra_state: Mapping[str, Stateful] | None = None,
    ) -> None:
        """Keeps ``ddp_model``'s replica equal to the others' from now on; ``register`` calls it with its own arguments.

        A wrapper around an optimizer (Accelerate's) stands for it.
        """
        while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            optimizer = inner  # its own step is what hooks see; with the wrapper beside it steps were applied twice
        if self.communicator is None:
            return
        if optimizer is not None:
            refuse_optimizer(optimizer)
        if self.resync is not None:
            raise ConfigError(
                "this TailboundState has a model already: make one TailboundState for each model, or call register "
                "for each"
            )
        if self.communicator.elastic and any(one.entrance is not None for one in _attached):
            raise ConfigError(
                "a rank that comes back enters with one model, and another one is registered already: wrap a module "
                "that contains both, or use torch.distributed.init_process_group"
            )
        module = ddp_model.module if isinstance(ddp_model, DistributedDataParallel) else ddp_model
        replica = Replica(module, least=self.ranks)
        if optimizer is not None and not replica.adopt(optimizer):
            raise ConfigError("the optimizer steps none of the model's parameters: give register the one that does")
        self._tell_of_ring(self.communicator, self._tensors(replica))
        parts = self.communicator, replica, self.layout, weakref.ref(self)
        self.resync = Resync(*parts, *self._resync_settings, compare=self._compares, extra_state=extra_state)
        # first of all hooks: FSDP's own gathers the parameters, which a boundary may still change
        self._handles.append(ddp_model.register_forward_pre_hook(WeakHook(self._before_forward), prepend=True))
        if getattr(ddp_model, "static_graph", False):
            self.layout.follow(replica.parameters, used_by(ddp_model))
        for step_hook in (
            register_optimizer_step_pre_hook(WeakHook(self.steps.before_step)),
            register_optimizer_step_post_hook(WeakHook(self.steps.after_step)),
        ):
            self._handles.append(step_hook)
            self._endings.insert(0, step_hook.remove)
        self.layout.compare(module.parameters())
        if optimizer is not None:
            self.steps.look_at(optimizer)
        if self.communicator.elastic:
            self.entrance = Entrance(self.communicator, self.resync, self.layout)
            self._joinless = _JOINLESS
        if self._joinless:
            self._handles.append(RefusedJoin(ddp_model, self._joinless))
        _attached.add(self)
        if not self.outside:
            self._prepare(True)

    def _tensors(self, replica: Replica) -> tuple[int, ...]:
        """Entries of the tensors that this rank's job averages in a step."""
        return tuple(size for p in replica.parameters if (size := p.numel()))

    def _tell_of_ring(self, communicator: Communicator, tensors: tuple[int, ...]) -> None:
        """Says what the rings take, and how many steps of ``tensors`` they hold."""
        rows, held, taken = communicator.rings(tensors)
        log.log(
            logging.INFO if rows <= held else logging.WARNING,
            "rank %d: the rings take %d MiB of memory and hold %s steps of this model (%.1f M parameters): a rank "
            "that misses at most %d applies the others' averages, one that misses more takes another's state",
            self.rank,
            taken >> 20,
            f"{held / rows:.1f}" if held < 10 * rows else held // rows,
            sum(tensors) / 1e6,
            max(0, held // rows - 1),
        )

    def begin(self, timeout: float) -> None:
        """Where ranks may come back, DDP runs on each rank by itself: all begin with what rank 0 holds."""
        if self.entrance is None or self.resync is None or self.communicator is None or self.outside:
            return
        if self.rank:
            self.resync.unsound()
        if not self.synchronize(timeout):
            raise TransportError(
                f"rank {self.rank}: ranks did not take over what rank 0 holds within {timeout:g} s: look at the other "
                "ranks' logs, or raise timeout= (TAILBOUND_TIMEOUT)"
            )
        self.communicator.part = Part.INSIDE

    def _prepare(self, on: bool) -> None:
        """Until its first step is launched a rank holds the others: its first pass may compile for a minute."""
        if on != self._preparing:
            self._preparing = on
            self._hold(on)

    @property
    def outside(self) -> bool:
        """Whether this process has come back to a job under way, and makes steps by itself until it enters."""
        return self.entrance is not None and self.entrance.outside

    @property
    def behind(self) -> int:
        """Steps that the others have finished and this rank has not."""
        return self.communicator.behind if self.communicator is not None else 0

    def note_missing(self, rows: int) -> None:
        """An average has been applied without ``rows`` of its rows."""
        if rows and self.resync is not None:
            self.resync.unsound()

    @torch.compiler.disable
    def boundary(self) -> None:
        """Between two steps, after ``optimizer.step()``; where that is still to come, the step stays open."""
        if not self.steps.half_made:
            self.end_step(still=True)

    @torch.compiler.disable
    def _before_forward(self, ddp_model: torch.nn.Module | None = None, *_: object) -> None:
        """Before a forward pass of the model: as a rule the boundary of two steps.

        A model may also be called between ``backward`` and ``step``, and with parameters that are those of no step.
        """
        self.absence.joined = joined(ddp_model)
        if self.resync is not None and self.resync.moment.changes:
            return
        if self.steps.ended is not None:
            if self.steps.half_made:
                return
            self.end_step(still=True)
        if self._new_step:  # also where the program has called ``boundary`` by itself
            self._new_step = False
            self.rejoin()

    def before_backward(self) -> None:
        """The first average of a step is about to be launched."""
        self.steps.begin()
        self.absence.before_backward()
        if self.resync is None or self.steps.announced:
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
        if self.detached:
            return
        half_made = self.steps.half_made
        step, self.steps.ended = self.steps.ended, None
        if still and step is not None and self.optimizers and not self.absence.skips:
            self.steps.split()  # else ``batches`` says when an iteration is over
        if step == BY_ITSELF:
            if still:
                (self.absence.follow if self.absence.void else self._come_in)()
            return
        self._new_step |= step is not None
        if step is not None and self.resync is not None:
            self.resync.boundary(step, still=still)
            self.steps.name_what_stays()
            if self.absence.abstaining and self.resync.sound:
                self.absence.abstaining = False
        if still and not half_made and self.entrance is not None and not self.outside:
            self.entrance.admit(held=self._preparing or self._within > 0)

    def _come_in(self) -> None:
        """Between two steps: a rank that is outside enters, as soon as it can."""
        assert self.entrance is not None
        assert self.communicator is not None
        if self.entrance.enter(_ENTER):
            self._preparing = True  # it holds the others since it has entered
            self.memory.forget()
            self.overflowed = False
            # its data are where its own steps have led it
            self.absence.skipped += max(0, self.communicator.step - self.entrance.alone)

    def rejoin(self) -> None:
        """Between two steps: a rank that is lost joins the others; a ``TransportError`` once it could not for long."""
        self.absence.rejoin()

    def synchronize(self, timeout: float = 30.0) -> bool:
        """Makes all replicas equal to the bit, between two steps: before a checkpoint, or at the end.

        To be called on all ranks after the same step, and after ``optimizer.step()``: before that ranks are made equal
        as they are there, and none comes in. All compare digests of parameters, of what the optimizers keep, and of
        buffers. Who holds something else takes what most of the ranks hold that have missed nothing.

        Args:
            timeout: seconds to wait, for the slowest rank and for what has to be taken.

        Returns:
            Whether every rank that has not died answered, these are a quorum, and all of them are equal. False if a
            rank did not come within half of ``timeout``, has closed, is ``outside``, or has gone on without
            synchronizing; those that came are equal then, as far as time allowed. The log says who was compared.
        """
        self._refuse_detached("synchronize")
        half_made, ended = self.steps.half_made and not self.absence.void, self.steps.ended  # zeros are left for none
        if half_made and self.outside:
            return False
        self.end_step(still=True)
        for other in attached():  # of one loop: a rank may be waiting for its state before it comes here
            if other is not self and not (other.steps.half_made or other.absence.void or other.outside):
                other.end_step(still=False)
        if self.resync is None or self.communicator is None:
            return True
        if self.absence.void:  # the others may be waiting for this rank here
            self.absence.follow(met=True)
        if self.absence.place in (Place.OUTSIDE, Place.VOID):
            return False
        if self.resync.moment.step is None:  # as all have begun
            self.resync.moment.settle(self.communicator.step - 1 & STEP_MASK)
        well = self.resync.synchronize(timeout)
        if half_made:  # nobody may take this for the state after the step
            self.steps.ended = ended
            self.resync.moment.disturb()
        if self.resync.sound:
            self.absence.abstaining = False
        return well

    @contextmanager
    def hold(self, *, changes: bool = False) -> Iterator[None]:
        """Within the context the others wait for this rank, up to ``hold_max``, and leave it out of nothing.

        Anywhere between two averages; before ``optimizer.step()`` the step stays open.

        Args:
            changes: the weights are others within (their averages, which are evaluated, say), and are put back before
                the end. No rank takes this one's state meanwhile, and this one joins the others after it.
        """
        if self.communicator is None or self.detached:
            yield
            return
        if not self.steps.half_made and not self._takes:
            self.end_step(still=True)
        self._hold(True)
        self._within += 1
        try:
            with self.resync.moment.change() if changes and self.resync is not None else nullcontext():
                yield
        finally:
            self._within -= 1
            if not self._preparing and not self._within:
                self._hold(False)

    def _hold(self, on: bool) -> None:
        """Tells the others that this rank holds, or no longer."""
        if self.communicator is not None:
            self.communicator.hold(on)

    def catch_up(self, step: Callable[[], object] | None = None) -> tuple[int, int]:
        """Between two iterations: applies those that the others have finished, without computing them.

        An iteration of several passes is learned from the last ones, and applied as a whole. Where the averages are
        gone, this rank joins the others in their step and takes another rank's state.

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
        self._refuse_detached("catch_up")
        return self.absence.catch_up(step)

    def stats(self) -> dict[str, Any]:
        """Counters of this rank, in plain types (``tailbound.collective.report.snapshot``), of zero for one rank.

        ``replica`` tells of re-synchronization, ``device_codec`` says by device what codes its buckets.
        """
        stats = self.communicator.stats() if self.communicator is not None else report.alone()
        if self.resync is not None and self._compares:
            stats["replica"] = self.resync.stats()
        stats["history"] = self.history
        if forms := self.paths.forms():
            stats["device_codec"] = forms
        return stats

    def state_dict(self) -> dict[str, Any]:
        """A checkpoint in plain types (``torch.load(weights_only=True)``): data to skip, and counters.

        One rank's is enough for all. The loss scale is in the scaler's own, and what a job learns it learns anew.
        """
        counters = self.communicator.job.counters if self.communicator is not None else {}
        run = {"ranks": self.ranks} | {name: int(counters.get(name, 0)) for name in _KEPT}
        owed, history = self.owed_batches, [*self.history, run]
        return {"format": FORMAT, "rank": self.rank, "ranks": self.ranks, "owed_batches": owed, "history": history}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from ``state_dict()`` of an earlier run, of whatever rank and world size; before the first step.

        Raises:
            ConfigError: another kind of state, or one of a newer version.
        """
        try:
            known, rank, ranks = (int(state_dict[name]) for name in ("format", "rank", "ranks"))
            owed, history = int(state_dict["owed_batches"]), [dict(run) for run in state_dict["history"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"this is no state of Tailbound ({error!r}): give what state_dict() returned") from error
        if known > FORMAT:
            raise ConfigError(
                f"this state has format {known}, of a newer version (known: {FORMAT}): install that version"
            )
        self.history = history
        if (rank, ranks) == (self.rank, self.ranks):  # another world has another part of the data for each rank
            self.owed_batches = owed

    def detach(self, timeout: float = 30.0) -> bool:
        """Makes the replicas equal and returns the model to DDP's own all-reduce, from the next iteration on.

        To be called on all ranks after the same step, and after ``optimizer.step()``. The transport is closed then, so
        that every rank waits for every other one as in any DDP job. ``stats`` and ``state_dict`` can still be read, and
        ``batches`` leaves nothing out. Tailbound cannot be put under this DDP model again: wrap ``model.module`` anew.

        Returns:
            What ``synchronize(timeout)`` says. False: DDP makes replicas equal only when made, so wrap the module anew.

        Raises:
            ConfigError: before ``optimizer.step()``, for FSDP or ranks that may come back, or for the second time.
        """
        self._refuse_detached("detach")
        if self.entrance is not None or not self._of_ddp:
            raise ConfigError(
                "FSDP, and DDP where ranks may come back, have no all-reduce of their own: use this state to the end"
            )
        if self.steps.half_made:
            raise ConfigError("detach() between backward() and optimizer.step(): move it behind optimizer.step()")
        well = self.synchronize(timeout)
        self.detached = True
        self.close()
        return well

    def _refuse_detached(self, name: str) -> None:
        """Raises a ``ConfigError`` for a call of ``name`` that has no meaning after ``detach``."""
        if self.detached:
            raise ConfigError(f"{name}(): this state was detached, and the model is plain DDP now: leave the call out")

    def _let_go(self) -> None:
        """Lets go of the model. Threads that keep replicas equal end with the communicator."""
        self._unused.detach()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _attached.discard(self)
        if self.scaler is not None:
            self.scaler.close()

    def close(self, *, farewell: bool = True) -> None:
        """Ends the transport thread and releases the datapath; without ``farewell`` others take this rank for dead."""
        self._let_go()
        if self.communicator is not None:
            self.communicator.close(farewell=farewell)

    def __enter__(self) -> TailboundState:
        return self

    def __exit__(self, raised: object = None, *_: object) -> None:
        self.close(farewell=raised is None)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a registered model, or one from a file, has no part in the job: None stands there for the state."""
        return type(None), ()

    def note(self, outcome: Outcome) -> None:
        """Takes in what became of a bucket, and warns."""
        self.last = outcome
        self.note_missing(outcome.missed + outcome.doubtful)
        if outcome.overflowed:  # what another thread has noted meanwhile stays
            self.overflowed = True
        self._complaints.note(outcome)


TailboundState.__doc__ = f"{TailboundState.__doc__}\n    Options:\n{described()}"


def model_digest(model: torch.nn.Module) -> str:
    """Digest of names, shapes and types of the trainable parameters, in order."""
    parts = [f"{n}:{tuple(p.shape)}:{p.dtype}" for n, p in model.named_parameters() if p.requires_grad]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def attached() -> list[TailboundState]:
    """The states of all registered models of this process that are not closed."""
    return list(_attached)


class WeakHook:
    """A hook that does not keep the object of ``method``. In a copy of a model it does nothing."""

    def __init__(self, method: Callable[..., Any] | None = None) -> None:
        self._held = weakref.WeakMethod(method) if method is not None else None

    @torch.compiler.disable
    def __call__(self, *arguments: Any) -> Any:
        """As ``method``, while its object is there."""
        if self._held is not None and (found := self._held()) is not None:
            return found(*arguments)
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return WeakHook, ()


def _end_aside(endings: list[Callable[[], object]]) -> None:
    """Ends a job that nobody can use any more, in a thread of its own: what dropped it may be one of the job's."""
    if endings:
        threading.Thread(target=lambda: [end() for end in endings], name="tailbound-end", daemon=True).start()
