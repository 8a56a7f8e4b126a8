"""The bounded half of a process group: all-reduces of floating-point tensors through a job of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tailbound.collective.communicator import MAX_STEP_OPS, Communicator, Handling, jobs_here
from tailbound.collective.op import Outcome
from tailbound.errors import ConfigError, TransportError
from tailbound.torch.backend_work import BoundedWork
from tailbound.torch.passes import Passes
from tailbound.torch.paths import DTYPES, BucketPath
from tailbound.torch.state import TailboundState


def can_be_bounded(tensors: list[torch.Tensor], op: Any) -> bool:
    """Whether ``op`` over ``tensors`` is a sum or an average of dense floating-point values, and not an empty one."""
    if op != dist.ReduceOp.SUM and op != dist.ReduceOp.AVG:
        return False
    return all(t.dtype in DTYPES and t.layout == torch.strided and t.numel() for t in tensors)


class Bounded:
    """The job of one process group; it starts with the first bounded all-reduce, when all ranks have come to it.

    Args:
        transport: options of ``TailboundState``.
    """

    def __init__(self, transport: dict[str, Any]) -> None:
        self._transport = transport
        self._steps = Passes()
        self._buckets = self._ops = 0  # of the present step
        self._lock = threading.Lock()  # ops are placed in the order in which they are launched
        self._closed = False
        self.state: TailboundState | None = None

    def allreduce(self, group: dist.ProcessGroup, tensors: list[torch.Tensor], op: Any) -> BoundedWork:
        """Averages ``tensors`` (CPU, of a type in ``DTYPES``, any shape and strides) in place over ``group``.

        A sum is the average times the number of ranks, also where a rank's contribution is missing.

        Raises:
            ConfigError: tensors on another device, or too large for the ring; a step without an end; invalid settings.
            CapabilityError, AttachError, LayoutError, TransportError: the job cannot start or go on.
        """
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise ConfigError(
                    f"a bounded all-reduce of a tensor on {tensor.device}: only CPU tensors can be bounded by the "
                    "backend; use tailbound.torch.register for a DDP model, or put this within tailbound.torch.exact()"
                )
        work = BoundedWork(tensors)
        with self._lock:
            communicator = self._communicator(group)
            for tensor in tensors:
                self._ops += communicator.ops(tensor.numel())
                if self._ops >= MAX_STEP_OPS:  # one is left for `end_step`
                    raise ConfigError(
                        f"rank {group.rank()}: bounded all-reduce {self._buckets} since the last end_step() brings the "
                        f"step to {self._ops} ops, of {MAX_STEP_OPS} that a step can have: call tailbound.torch."
                        "end_step() on all ranks after every step of training, or give a larger ring_mib"
                    )
                last = self._steps.call((tensor.numel(), tensor.dtype))
                factor = group.size() if op == dist.ReduceOp.SUM else 1
                _launch(communicator, tensor, self._buckets, last, factor, self._done(work))
                self._buckets += 1
        return work

    def end_step(self, group: dist.ProcessGroup) -> None:
        """A step of training is over: see ``backend_modes.end_step``."""
        with self._lock:
            if self._steps.over():
                nothing = torch.zeros(1)
                communicator, done = self._communicator(group), self._done(BoundedWork([nothing]))
                _launch(communicator, nothing, self._buckets, True, 1, done)
            self._buckets = self._ops = 0

    def _communicator(self, group: dist.ProcessGroup) -> Communicator:
        if self._closed:
            raise TransportError(f"rank {group.rank()}: this process group has been shut down; make another one")
        if self.state is None:
            self.state = TailboundState(group, **{**_place(group), **self._transport})
        communicator = self.state.communicator
        assert communicator is not None, "a group of one rank has nothing to average"
        return communicator

    def _done(self, work: BoundedWork) -> Callable[[Outcome, BaseException | None], None]:
        state = self.state
        assert state is not None

        def done(outcome: Outcome, error: BaseException | None) -> None:
            try:
                state.note(outcome)
            finally:
                work.one_done(error)

        return done

    def stats(self) -> dict[str, Any]:
        """Counters of the job (``TailboundState.stats``); empty before the first bounded all-reduce."""
        return self.state.stats() if self.state is not None else {}

    def close(self) -> None:
        """Ends the job; what is in flight ends first, in bounded time. May be called twice."""
        self._closed = True
        if self.state is not None:
            self.state.close()


def _place(group: dist.ProcessGroup) -> dict[str, Any]:
    """Where a job goes that nobody has given a place: an interface takes one xdp job, and a port is taken once.

    The default group's job has both, unless another job (a DDP hook's) has been here before; the greeting tells the
    other ranks which port it is.
    """
    first = group is dist.group.WORLD and not jobs_here()
    return {} if first else {"datapath": "udp", "port": 0}


def _launch(
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
        handling=Handling(str(tensor.dtype).removeprefix("torch.")),
    )
