"""The backend ``tailbound`` of ``torch.distributed``: Gloo, with all-reduces in bounded time where the caller asks.

A process group cannot tell a gradient from a metric, so everything goes to Gloo unless the caller has said otherwise:
by ``pg_options=BackendOptions(bounded=True)``, or around a call by ``bounded()``. Only ``allreduce`` and its coalesced
form may be bounded; all other operations are those of a plain ``torch.distributed.ProcessGroup`` over Gloo.

That plain group is an object of its own. The base class's own methods would reach Gloo through PyTorch's trampoline,
which keeps the interpreter lock while Gloo's queue is locked. Gloo's threads take the two the other way round when they
drop the last reference to a tensor: ranks then hang for ever. Gloo's destructor locks the queue, too, and the
reducer of a DDP model that calls it last keeps the interpreter lock. So a group that was shut down outlives its
operations by a moment (``_outlive``).
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, _DistributedBackendOptions

from tailbound.autoload import BACKEND
from tailbound.errors import ConfigError
from tailbound.settings.table import Options, refuse_unknown
from tailbound.torch.backend_bounded import Bounded, can_be_bounded
from tailbound.torch.elastic import COLLECTIVES, Elastic, ElasticProcessGroup
from tailbound.torch.state import TailboundState

#: Seconds in which Gloo's threads have dropped the tensors of operations that are over.
_DROPPED = 1.0


class BackendOptions:
    """Options of a process group of the backend ``tailbound``.

    Args:
        bounded: average floating-point all-reduces of this group in bounded time, except within ``exact()``. Otherwise
            only within ``bounded()``.
        **transport: options of ``TailboundState``, for the group's own job: ``interface``, ``deadline_ms``, ... Those
            about a model's replica have no effect.

    Raises:
        ConfigError: an option that is none.
    """

    def __init__(self, *, bounded: bool = False, **transport: Unpack[Options]) -> None:
        refuse_unknown(transport)
        self.bounded, self.transport = bool(bounded), {**transport}

    def __repr__(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self.transport.items())
        return f"BackendOptions(bounded={self.bounded}{given})"


class TailboundProcessGroup(dist.ProcessGroup):
    """A process group over Gloo; made by ``init_process_group("tailbound")`` and ``new_group``.

    Args:
        store: of this group alone.
        rank, size: of this process in the group.
        timeout: of Gloo's operations.
        options: see ``BackendOptions``.

    Attributes:
        bounded_now: floating-point all-reduces that are called now take bounded time (``bounded``, ``exact``).
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
        self.bounded_now = options.bounded
        self._bounded = Bounded(options.transport)

    def getBackendName(self) -> str:
        """As ``torch.distributed.get_backend`` says."""
        return BACKEND

    def get_group_store(self) -> Store:
        """The store that the group was made with."""
        return self._store

    @torch.compiler.disable
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """All-reduces ``tensors`` in place; bounded if asked for and possible, else by Gloo.

        Raises:
            TailboundError: see ``Bounded.allreduce``.
        """
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if not isinstance(opts, dist.AllreduceOptions):
            opts = _options(dist.AllreduceOptions(), opts, timeout)
        if self._bounds(tensors, opts.reduceOp):
            return self._bounded.allreduce(self, tensors, opts.reduceOp)
        return self._exact.allreduce(tensors, opts)

    @torch.compiler.disable
    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """All-reduces every one of ``tensors`` in place; as ``allreduce``."""
        if not isinstance(opts, dist.AllreduceCoalescedOptions):
            opts = _options(dist.AllreduceCoalescedOptions(), opts, None)
        if self._bounds(tensors, opts.reduceOp):
            return self._bounded.allreduce(self, list(tensors), opts.reduceOp)
        return self._exact.allreduce_coalesced(tensors, opts)

    def _bounds(self, tensors: list[torch.Tensor], op: Any) -> bool:
        return self.bounded_now and self.size() > 1 and can_be_bounded(tensors, op)

    def end_step(self) -> None:
        """A step of training is over: its bounded all-reduces have been called (``tailbound.torch.end_step``)."""
        self._bounded.end_step(self)

    @property
    def state(self) -> TailboundState | None:
        """State of this group's bounded all-reduces; None before the first of them."""
        return self._bounded.state

    def stats(self) -> dict[str, Any]:
        """Counters of this group's bounded all-reduces (``TailboundState.stats``); empty before the first of them."""
        return self._bounded.stats()

    def shutdown(self) -> None:
        """Ends the group; ``destroy_process_group`` calls it."""
        self._bounded.close()
        super().shutdown()
        self._outlive()

    def abort(self) -> None:
        """Ends the group and lets Gloo's operations fail."""
        self._bounded.close()
        super().abort()
        self._outlive()

    def _outlive(self) -> None:
        """Lets no other reference to Gloo be the last one before its threads are idle.

        This one is dropped by a thread whose drop, by PyTorch's binding of the class, releases the interpreter lock.
        """
        gloo, self._gloo = self._gloo, None
        if gloo is not None:
            threading.Thread(target=_hold, args=(gloo,), name="tailbound-gloo", daemon=True).start()


def _hold(_: object) -> None:
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


def _options(options: Any, op: Any, timeout: timedelta | None) -> Any:
    """``options`` of an all-reduce, from the arguments of its shorter forms."""
    if op is not None:
        options.reduceOp = op
    if timeout is not None:
        options.timeout = timeout
    return options


def create(backend: _DistributedBackendOptions, options: Any) -> dist.ProcessGroup:
    """A group, from ``torch.distributed``'s description of it and the caller's ``pg_options``.

    Raises:
        ConfigError: ``pg_options`` of another kind.
    """
    if isinstance(options, Elastic):
        return ElasticProcessGroup(backend.group_rank, backend.group_size)
    if options is not None and not isinstance(options, BackendOptions):
        raise ConfigError(
            f"pg_options is a {type(options).__name__}: give the backend 'tailbound' a tailbound.torch.BackendOptions"
        )
    return TailboundProcessGroup(backend.store, backend.group_rank, backend.group_size, backend.timeout, options)
