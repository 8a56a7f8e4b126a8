"""The backend ``tailbound`` of ``torch.distributed``: Gloo, with all-reduces in bounded time where the caller asks.

A process group cannot tell a gradient from a metric, so everything goes to Gloo unless the caller has said otherwise:
by ``pg_options=BackendOptions(bounded=True)``, or around a call by ``bounded()``. Only ``allreduce`` and its coalesced
form may be bounded; all other operations are those of a plain ``torch.distributed.ProcessGroup`` over Gloo.

That plain group is an object of its own. The base class's own methods would reach Gloo through PyTorch's trampoline,
which keeps the interpreter lock while Gloo's queue is locked. Gloo's threads take the two the other way round when they
drop the last reference to a tensor: ranks then hang for ever. Gloo's destructor locks the queue, too (``_outlive``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, _DistributedBackendOptions

from tailbound.autoload import BACKEND
from tailbound.collective.communicator import MAX_STEP_OPS, Communicator, Handling, jobs_here
from tailbound.collective.op import Outcome
from tailbound.errors import ConfigError, TransportError
from tailbound.settings.table import Options, refuse_unknown
from tailbound.torch.elastic import COLLECTIVES, Elastic, ElasticProcessGroup
from tailbound.torch.paths import DTYPES, BucketPath
from tailbound.torch.state import TailboundState

#: Seconds in which Gloo's threads have dropped the tensors of operations that are over.
_DROPPED = 1.0
_FOREVER = timedelta(0)


class BackendOptions:
    """Options of a process group of the backend ``tailbound``.

    Args:
        bounded: average floating-point all-reduces of this group in bounded time, except within ``exact()``. Otherwise
            only within ``bounded()``.
        **transport: options of ``TailboundState``, for the group's own job (another one is a ``ConfigError``). Those
            about a replica have no effect.
    """

    def __init__(self, *, bounded: bool = False, **transport: Unpack[Options]) -> None:
        refuse_unknown(transport)
        self.bounded, self.transport = bool(bounded), {**transport}


class BoundedWork(dist.Work):
    """Completes, in the transport thread, once all of ``tensors`` have been averaged in place.

    A future that a Python process group gives an exception ends the process with a segmentation fault (PyTorch 2.13).
    So it completes with the tensors, and errors come from ``wait`` and from the future behind it (``get_future``).
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors, self._left = tensors, len(tensors)
        self._errors: list[BaseException] = []
        self._over, self._lock = threading.Event(), threading.Lock()
        self._done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._checked = self._done.then(self._check)

    def one_is_over(self, error: BaseException | None) -> None:
        """To be called once for each of the tensors."""
        with self._lock:
            self._errors += [error] if error is not None else []
            self._left -= 1
            over = not self._left
        if over:
            self._over.set()
            self._done.set_result(self._tensors)

    def _check(self, _: object = None) -> list[torch.Tensor]:
        if self._errors:
            raise self._errors[0]
        return self._tensors

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Waits until the averages are there; ``timeout`` bounds the caller only, the op has a bound of its own.

        Raises:
            TailboundError: why the averages cannot be used.
            TransportError: ``timeout`` was shorter.
        """
        if not self._over.wait(timeout.total_seconds() if timeout > _FOREVER else None):
            raise TransportError(
                f"this bounded all-reduce is not over after {timeout.total_seconds():g} s: give wait a longer timeout"
            )
        self._check()
        return True

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._over.is_set()

    def is_success(self) -> bool:
        """Whether it is over, without an error."""
        return self._over.is_set() and not self._errors

    def exception(self) -> Any:
        """The error, if it ended with one."""
        return self._errors[0] if self._over.is_set() and self._errors else None

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Completes with the tensors; raises in ``wait`` and ``value`` if they cannot be used."""
        return self._checked


def launch(
    communicator: Communicator,
    tensor: torch.Tensor,
    bucket: int,
    last: bool,
    factor: int,
    done: Callable[[Outcome, BaseException | None], None],
) -> None:
    """Averages ``tensor`` into itself, times ``factor``, where the codec reads and writes its type.

    Others go through float32 memory; so do halves with a factor that is no power of two, which would be rounded twice.
    """
    mine, path = tensor.detach(), BucketPath()
    native = mine.dtype == torch.float32 or (mine.dtype in path.native and factor.bit_count() == 1)
    direct = native and mine.is_contiguous()
    flat = mine.view(-1) if direct else torch.empty(mine.numel(), dtype=torch.float32)
    # torch lets such tensors be written within that mode only, and the transport's thread is not in it by itself
    inference = mine.is_inference() or flat.is_inference()

    def read() -> None:
        with torch.inference_mode(inference):
            flat.view(mine.shape).copy_(mine)

    def back(outcome: Outcome) -> None:
        error: BaseException | None = outcome.error
        try:
            with torch.inference_mode(inference):
                if factor != 1 and not native:
                    flat.mul_(factor)
                if not direct:
                    mine.copy_(flat.view(mine.shape))
                if factor != 1 and native:  # after rounding on all ranks, however their tensors lie: bits are the same
                    mine.mul_(factor)
        except Exception as caught:  # a work that never completes would hang its caller
            error = error or caught
        done(outcome, error)

    communicator.launch(
        bucket,
        path.values(flat),
        path.values(flat),
        last=last,
        done=back,
        prepare=None if direct else read,
        handling=Handling(str(tensor.dtype).removeprefix("torch."), quorum=False),
    )


class Passes:
    """Which all-reduce is the last of a step, where no rank says so beforehand.

    The transport numbers ops by (step, index), learns deadlines from steps of the same layout and foresees their ops
    (clock-2, clock-5, clock-18). FSDP tells only that a backward pass is over, and the caller of the backend that a
    step is. Each pass is expected to be like the one before, and all ranks come to the same answer without a word. One
    that turns out otherwise, as the first one does, is ended by an empty op once it is over.
    """

    def __init__(self) -> None:
        self._plan: tuple[Hashable, ...] = ()
        self._calls: list[Hashable] = []
        self._open = False

    def call(self, what: Hashable) -> bool:
        """One more all-reduce, ``what`` is equal for the same one in two passes; returns whether it ends the step."""
        self._calls.append(what)
        self._open = tuple(self._calls) != self._plan
        return not self._open

    def over(self, whole: bool = True) -> bool:
        """The pass is over; returns whether its step has not ended yet, so that an empty op has to end it.

        ``whole``: the next one is expected to be like it, not like the one before.
        """
        if self._calls and whole:
            self._plan = tuple(self._calls)
        self._calls.clear()
        unfinished, self._open = self._open, False
        return unfinished


class TailboundProcessGroup(dist.ProcessGroup):
    """A process group over Gloo; made by ``init_process_group("tailbound")`` and ``new_group``.

    Attributes:
        bounded_now: floating-point all-reduces that are called now take bounded time (``bounded``, ``exact``).
        state: of this group's bounded all-reduces; None before the first of them, when all ranks have come to it.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, options: BackendOptions | None = None
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the form with a store makes no subclass
        self._store = store
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        gloo._set_sequence_number_for_group()
        self._gloo: dist.ProcessGroupGloo | None = gloo
        kind = dist.ProcessGroup.BackendType.GLOO
        self._exact = dist.ProcessGroup(rank, size)  # type: ignore[call-arg]
        for group in (self, self._exact):
            for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
                group._register_backend(torch.device(device), kind, gloo)
            group._set_default_backend(kind)
        options = options or BackendOptions()
        self.bounded_now, self._transport = options.bounded, options.transport
        self.state: TailboundState | None = None
        self._steps, self._lock = Passes(), threading.Lock()  # ops are placed in the order in which they are launched
        self._buckets = self._ops = 0  # of the present step

    def getBackendName(self) -> str:
        """As ``torch.distributed.get_backend`` says."""
        return BACKEND

    def get_group_store(self) -> Store:
        """The store that the group was made with."""
        return self._store

    @torch.compiler.disable
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """All-reduces ``tensors`` in place; bounded if asked for and possible, else by Gloo.

        A bounded sum is the average times the number of ranks, also where a rank's contribution is missing.

        Raises:
            ConfigError: bounded tensors on another device, or too large for the ring; a step without an end; invalid
                settings.
            CapabilityError, AttachError, LayoutError, TransportError: the job cannot start or go on.
        """
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        opts = _options(dist.AllreduceOptions, opts, timeout)
        return self._bounded(tensors, opts.reduceOp) or self._exact.allreduce(tensors, opts)

    @torch.compiler.disable
    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """All-reduces every one of ``tensors`` in place; as ``allreduce``."""
        opts = _options(dist.AllreduceCoalescedOptions, opts)
        return self._bounded(list(tensors), opts.reduceOp) or self._exact.allreduce_coalesced(tensors, opts)

    def _bounded(self, tensors: list[torch.Tensor], op: Any) -> BoundedWork | None:
        """Averages ``tensors`` (of any shape and strides) in place; None where it was not asked for, or cannot be."""
        added = op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG
        kinds = all(t.dtype in DTYPES and t.layout == torch.strided and t.numel() for t in tensors)
        if not (self.bounded_now and self.size() > 1 and added and kinds):
            return None
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise ConfigError(
                    f"a bounded all-reduce of a tensor on {tensor.device}: only CPU tensors can be bounded by the "
                    "backend; use tailbound.torch.register for a DDP model, or put this within tailbound.torch.exact()"
                )
        work, factor = BoundedWork(tensors), self.size() if op == dist.ReduceOp.SUM else 1
        with self._lock:
            communicator = self._communicator()
            for tensor in tensors:
                self._ops += communicator.ops(tensor.numel())
                if self._ops >= MAX_STEP_OPS:  # one is left for `end_step`
                    raise ConfigError(
                        f"rank {self.rank()}: bounded all-reduce {self._buckets} since the last end_step() brings the "
                        f"step to {self._ops} ops, of {MAX_STEP_OPS} that a step can have: call tailbound.torch."
                        "end_step() on all ranks after every step of training, or give a larger ring_mib"
                    )
                last = self._steps.call((tensor.numel(), tensor.dtype))
                self._launch(communicator, work, tensor, last, factor)
                self._buckets += 1
        return work

    def end_step(self) -> None:
        """A step of training is over: its bounded all-reduces have been called (``tailbound.torch.end_step``)."""
        with self._lock:
            if self._steps.over():
                nothing = torch.zeros(1)
                self._launch(self._communicator(), BoundedWork([nothing]), nothing, True, 1)
            self._buckets = self._ops = 0

    def _communicator(self) -> Communicator:
        if self._gloo is None:
            raise TransportError(f"rank {self.rank()}: this process group has been shut down; make another one")
        if self.state is None:
            # An interface takes one xdp job, and a port is taken once: the default group's job has both, unless
            # another job (a DDP hook's) has been here before.
            first = self is dist.group.WORLD and not jobs_here()
            place: dict[str, Any] = {} if first else {"datapath": "udp", "port": 0, "switch": None}
            self.state = TailboundState(self, **{**place, **self._transport})
        assert self.state.communicator is not None, "a group of one rank has nothing to average"
        return self.state.communicator

    def _launch(
        self, communicator: Communicator, work: BoundedWork, tensor: torch.Tensor, last: bool, factor: int
    ) -> None:
        state = self.state
        assert state is not None

        def done(outcome: Outcome, error: BaseException | None) -> None:
            try:
                state.note(outcome)
            finally:
                work.one_is_over(error)

        launch(communicator, tensor, self._buckets, last, factor, done)

    def stats(self) -> dict[str, Any]:
        """Counters of this group's bounded all-reduces (``TailboundState.stats``); empty before the first of them."""
        return self.state.stats() if self.state is not None else {}

    def shutdown(self) -> None:
        """Ends the group; ``destroy_process_group`` calls it. What is in flight ends first, in bounded time."""
        self._end(super().shutdown)

    def abort(self) -> None:
        """Ends the group and lets Gloo's operations fail."""
        self._end(super().abort)

    def _end(self, end: Callable[[], None]) -> None:
        if self.state is not None:
            self.state.close()
        end()
        gloo, self._gloo = self._gloo, None
        if gloo is not None:
            threading.Thread(target=_outlive, args=(gloo,), name="tailbound-gloo", daemon=True).start()


def _outlive(_: object) -> None:
    """Lets no other reference to Gloo be the last one before its threads are idle.

    A reducer of DDP that has the last one keeps the interpreter lock. A thread's drop, by PyTorch's binding, does not.
    """
    time.sleep(_DROPPED)


def _exact(name: str) -> Any:
    """Method ``name`` of the plain group, as one of ``TailboundProcessGroup``."""

    @torch.compiler.disable
    def call(self: TailboundProcessGroup, *arguments: Any, **named: Any) -> Any:
        return getattr(self._exact, name)(*arguments, **named)

    call.__name__ = name
    call.__doc__ = getattr(dist.ProcessGroup, name).__doc__
    return call


for _name in COLLECTIVES:
    if hasattr(dist.ProcessGroup, _name) and _name not in vars(TailboundProcessGroup):
        setattr(TailboundProcessGroup, _name, _exact(_name))


def _options(kind: Callable[[], Any], given: Any, timeout: timedelta | None = None) -> Any:
    """Options of an all-reduce; its shorter forms give the operation and the timeout in their place."""
    options = kind()
    if isinstance(given, type(options)):
        return given
    if given is not None:
        options.reduceOp = given
    if timeout is not None:
        options.timeout = timeout
    return options


def create(backend: _DistributedBackendOptions, options: Any) -> dist.ProcessGroup:
    """A group, from ``torch.distributed``'s description of it and the caller's ``pg_options``."""
    if isinstance(options, Elastic):
        return ElasticProcessGroup(backend.group_rank, backend.group_size)
    if options is not None and not isinstance(options, BackendOptions):
        raise ConfigError(
            f"pg_options is a {type(options).__name__}: give the backend 'tailbound' a tailbound.torch.BackendOptions"
        )
    return TailboundProcessGroup(backend.store, backend.group_rank, backend.group_size, backend.timeout, options)


class _Mode:
    """Sets ``bounded_now`` of a group for as long as the context lasts, for all threads: backward has its own."""

    def __init__(self, group: dist.ProcessGroup | None, on: bool) -> None:
        self._group, self._on = _ours(group), on
        self._before: list[bool] = []

    @torch.compiler.disable
    def __enter__(self) -> None:
        self._before.append(self._group.bounded_now)
        self._group.bounded_now = self._on

    @torch.compiler.disable
    def __exit__(self, *_: object) -> None:
        self._group.bounded_now = self._before.pop()


@torch.compiler.disable
def bounded(group: dist.ProcessGroup | None = None) -> _Mode:
    """Within the context, sums and averages of floating-point tensors over ``group`` take bounded time, and are lossy.

    ``with bounded(): loss.backward()`` and then ``end_step()`` do so for DDP without a hook. The context counts when an
    all-reduce is called, on all threads of this process, and must be the same on all ranks. All else stays exact:
    other operations, integers, other collectives.

    ``group``: of the backend ``tailbound``, else a ``ConfigError``; default: the default group.
    """
    return _Mode(group, True)


@torch.compiler.disable
def exact(group: dist.ProcessGroup | None = None) -> _Mode:
    """Within the context, all-reduces over ``group`` are exact again (a loss, a metric); otherwise as ``bounded``."""
    return _Mode(group, False)


@torch.compiler.disable
def end_step(group: dist.ProcessGroup | None = None) -> None:
    """Says that a step of training is over: all of its bounded all-reduces over ``group`` have been called.

    The transport learns deadlines from steps that are alike. Call it on all ranks at the same place after every step;
    it waits for nothing. All-reduces that no call ends are one step, which raises once it has too many ops. ``group``:
    as of ``bounded``; a ``TransportError`` once it has been shut down.
    """
    _ours(group).end_step()


def _ours(group: dist.ProcessGroup | None) -> TailboundProcessGroup:
    found = group if group is not None else dist.group.WORLD
    if isinstance(found, TailboundProcessGroup):
        return found
    if found is None or not isinstance(found, dist.ProcessGroup):
        raise ConfigError('no process group here: call torch.distributed.init_process_group("tailbound") first')
    raise ConfigError(
        f"this process group has the backend {dist.get_backend(found)!r}: only one of the backend 'tailbound' can be "
        'bounded; call torch.distributed.init_process_group("tailbound"), or new_group(..., backend="tailbound")'
    )
