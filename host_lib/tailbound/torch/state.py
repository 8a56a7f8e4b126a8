"""State of the DDP communication hook: one communicator, and memory of its own for every bucket."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tailbound.collective.communicator import Communicator
from tailbound.collective.op import Outcome
from tailbound.errors import ConfigError, TailboundError
from tailbound.torch import away
from tailbound.torch.finished import Layout
from tailbound.torch.replica import Replica
from tailbound.torch.resync import Resync
from tailbound.transport.choose import AskedResult, asked_for
from tailbound.transport.config import DEFAULT_PORT, MS, Config
from tailbound.transport.safeguard import Limits
from tailbound.transport.steps import step_of

log = logging.getLogger("tailbound")

#: Types of buckets that can be averaged; sums are taken in the rotated domain, in float32.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_jobs = 0


@dataclass
class _Bucket:
    """Memory of one bucket: what is coded (None: the bucket itself), what is decoded, what DDP gets."""

    source: torch.Tensor | None
    decoded: torch.Tensor
    result: torch.Tensor
    #: gradient of the last step that came too late to be sent, with ``late="carry"``
    carried: torch.Tensor | None = None


class TailboundState:
    """What ``allreduce_hook`` needs; make it with ``register`` or by hand before ``register_comm_hook``.

    Args:
        process_group: the group of the DDP model; its store is the rendezvous. Default: the default group.
        datapath: ``auto`` (``xdp`` where it can be had on ``interface``, else ``udp``), ``xdp`` or ``udp``.
            ``switch``: as ``auto``, with the rows averaged by the switch on the way (``tailbound switch``).
        switch: its address; default ``TAILBOUND_SWITCH``.
        interface: network interface of this rank; default ``TAILBOUND_INTERFACE``, else the way to MASTER_ADDR.
        port: UDP port of the job, the same on all ranks; default ``TAILBOUND_PORT``, else 5515.
        ring_mib: MiB of result rows kept ready to receive; bounds how much is in flight.
        deadline_ms: how long the first half may wait for contributions after a majority has shown up, and how much
            longer the second half for results; None: learned.
        hadamard: rotate, so that a lost packet costs every entry a little instead of some entries everything.
            ``"auto"``: only while packets are lost, switched at the same op on all ranks.
        safeguard: limits of loss beyond which to warn, skip an op, or stop (``transport.safeguard.Limits``).
        timeout: seconds to wait for the other ranks at the start.
        model: digest of what is trained (``model_digest``); ranks that differ are refused.
        share_rows: agree on owners, so that stragglers and slow links own fewer rows or none (CLOCKS.md rule 22).
        late: what becomes of a gradient that came too late to be sent: ``drop``, or ``carry`` for half of its sum with
            the next one as the next contribution (CODEC.md rule 15).
        resync_period: steps between two rounds in which ranks that have missed results take slices of the others'
            state (CLOCKS.md rule 21); 0: only when they have drifted apart, and on demand.
        resync_drift: relative distance to another rank at which a round is held early.
        resync_share: share of a step that a rank waits for such a slice; what comes later is taken in another round.
        result: how averaged rows come to the other ranks: a send to each (``peers``), one burst that the kernel
            (``fanout``) or the network (``multicast``) multiplies, or ``auto``, the best of what can be had; default
            ``TAILBOUND_RESULT``, else ``auto``.
        multicast_group: IPv4 group of the job, the same on all ranks; empty: one that follows from its cookie.

    Raises:
        ConfigError, CapabilityError, AttachError, LayoutError, TransportError: before any training step.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        datapath: str = "auto",
        switch: str | None = None,
        interface: str | None = None,
        port: int | None = None,
        ring_mib: float = 64.0,
        deadline_ms: tuple[float, float] | None = None,
        hadamard: bool | Literal["auto"] = True,
        safeguard: Limits | None = None,
        timeout: float = 180.0,
        model: str = "",
        share_rows: bool = True,
        late: str = "drop",
        resync_period: int = 200,
        resync_drift: float = 0.01,
        resync_share: float = 0.05,
        result: AskedResult | None = None,
        multicast_group: str = "",
    ) -> None:
        global _jobs
        if not dist.is_initialized():
            raise ConfigError("call torch.distributed.init_process_group before tailbound: its store is the rendezvous")
        group = process_group or dist.group.WORLD
        if group is None:
            raise ConfigError("there is no process group")
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        config = Config(
            rank=self.rank,
            ranks=self.ranks,
            port=_port() if port is None else port,
            ring_mib=ring_mib,
            deadline_1=int(deadline_ms[0] * MS) if deadline_ms else 0,
            deadline_2=int(deadline_ms[1] * MS) if deadline_ms else 0,
            rotate=hadamard,
            safeguard=safeguard or Limits(),
            share_rows=share_rows,
            result=asked_for() if result is None else result,
            group=multicast_group,
        )
        name = f"tailbound/{group.group_name}/{_jobs}"
        _jobs += 1
        if resync_period < 0 or not resync_drift > 0 or not resync_share > 0:
            raise ConfigError("resync_period is a number of steps or 0, resync_drift and resync_share are above 0")
        if late not in ("drop", "carry"):
            raise ConfigError(f'late={late!r}: give "drop" or "carry"')
        self._late, self._resync_settings = late, (resync_period, resync_drift, resync_share)
        self.layout = Layout()
        #: batches still to be skipped (``batches``)
        self.owed_batches = 0
        #: keeps the replica equal to the others', once attached to a model
        self.resync: Resync | None = None
        self._handles: list[Any] = []
        #: the step whose last bucket is over, until its boundary
        self.ended: int | None = None
        #: the state is not that of the others yet: take part without contributing (rule 20)
        self.abstaining = False
        self._buckets: dict[int, _Bucket] = {}
        self._complaints: Counter[str] = Counter()
        self._warned: set[int] = set()
        self.last = Outcome()
        #: the optimizer that ``register`` was given
        self.optimizer: torch.optim.Optimizer | None = None
        self.communicator: Communicator | None = None
        if self.ranks > 1:
            self.communicator = Communicator(
                dist.distributed_c10d._get_default_store(),
                config,
                datapath=datapath,
                switch=switch,
                interface=interface,
                name=name,
                timeout=timeout,
                model=model,
                on_thread=lambda: torch.set_num_threads(1),
            )
            log.info("rank %d of %d: tailbound over %s", self.rank, self.ranks, self.communicator.datapath)

    def average(self, index: int, tensor: torch.Tensor, last: bool) -> torch.futures.Future[torch.Tensor]:
        """Starts averaging one bucket; the future completes in bounded time with a tensor like ``tensor``.

        The tensor is memory of this state, used again for the same bucket in the next step.

        Raises:
            ConfigError: a bucket of a type, layout or device that is not supported.
            LayoutError: ranks disagree on an earlier op.
            TransportError: the transport has ended.
        """
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        _check(index, tensor)
        if self.communicator is None:
            future.set_result(tensor)
            return future
        bucket = self._bucket(index, tensor)
        prepare: Callable[[], None] | None = None
        source = tensor.detach()
        if bucket.carried is not None:
            source, bucket.carried = bucket.carried, None
            prepare = _Carry(source, tensor.detach())
            self._complaints["carried"] += 1
        elif bucket.source is not None:
            source, native = bucket.source, tensor.detach()
            prepare = _Copy(source, native)

        errors: list[TailboundError] = []

        def done(outcome: Outcome) -> None:
            if outcome.error is not None:
                errors.append(outcome.error)
            try:
                if outcome.unsent and self._late == "carry" and tensor.isfinite().all():
                    bucket.carried = tensor.detach().float().clone()
                if bucket.result is not bucket.decoded:
                    bucket.result.copy_(bucket.decoded)
                self.note(outcome)
                if last:
                    self.ended = step_of(outcome.label)
            finally:  # a future that never completes would hang DDP
                future.set_result(bucket.result)

        self.communicator.launch(
            index,
            source.numpy(),
            bucket.decoded.numpy(),
            last=last,
            done=done,
            dtype=str(tensor.dtype).removeprefix("torch."),
            prepare=prepare,
            contribute=not self.abstaining,
        )

        def checked(completed: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            # raising here, after completion, reaches backward() with this message; set_exception would not
            if errors:
                raise errors[0]
            return completed.value()

        return future.then(checked)

    def stats(self) -> dict[str, Any]:
        """Counters of this rank, in plain types (``tailbound.collective.report.snapshot``); empty for one rank.

        ``replica`` tells of re-synchronisation: whether this replica is sound (has missed no result since it was last
        equal to the others), its estimated relative ``drift``, and what was taken and given.
        """
        if self.communicator is None:
            return {}
        stats = self.communicator.stats()
        if self.resync is not None:
            stats["replica"] = self.resync.stats()
        stats["carried"] = self._complaints["carried"]
        return stats

    def close(self) -> None:
        """Ends the transport thread and releases the datapath; may be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.resync is not None:
            self.resync.close()
        if self.communicator is not None:
            self.communicator.close()

    def __enter__(self) -> TailboundState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def attach(self, ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Keeps ``ddp_model``'s replica equal to the others' from now on; ``register`` calls it.

        Steps end at the next forward pass of ``ddp_model``. Without ``optimizer``, those that step its parameters are
        found at their first ``step()``.
        """
        self.optimizer = optimizer
        if self.communicator is None or self.resync is not None:
            return
        replica = Replica(getattr(ddp_model, "module", ddp_model))
        if optimizer is not None and not replica.adopt(optimizer):
            raise ConfigError("the optimizer given to register steps none of the model's parameters")
        job, (period, drift, share) = self.communicator.job, self._resync_settings
        self.resync = Resync(
            self.communicator.reliable,
            replica,
            self.rank,
            self.ranks,
            job.cookie,
            lambda: [p for p in job.peers if p not in job.membership.gone | job.membership.dead(job.steps.own)],
            period=period,
            threshold=drift,
            share=share,
        )
        self._handles.append(ddp_model.register_forward_pre_hook(lambda *_: self.boundary()))
        self._handles.append(register_optimizer_step_pre_hook(self._before_step))

    @torch.compiler.disable
    def boundary(self) -> None:
        """Between two steps: the last one has been applied, the next one has not begun."""
        step, self.ended = self.ended, None
        if step is not None and self.resync is not None:
            self.resync.boundary(step)
            if self.abstaining and self.resync.sound:
                self.abstaining = False

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.resync is not None and self.resync.replica.adopt(optimizer):
            self.resync.moment.disturb()

    def synchronise(self, timeout: float = 10.0) -> bool:
        """Makes this replica equal to the others', between two steps: before a checkpoint or an evaluation.

        A rank that has missed nothing has nothing to do. Another one takes the whole state, point to point, from a rank
        that has missed nothing, or from the rank whose turn it is, which has to stand after the same step: so it works
        best when all ranks call it after the same step. It is no collective: a stopped rank costs a time-out.

        Returns:
            False if no rank that stands after the same step answered within ``timeout`` seconds.
        """
        self.boundary()
        return True if self.resync is None else self.resync.synchronise(timeout)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Within the context the others wait for this rank (a checkpoint, an evaluation) and leave it out of nothing.

        For as long as ``hold_max`` at most (CLOCKS.md rule 16).
        """
        if self.communicator is None:
            yield
            return
        self.boundary()
        self.communicator.hold(True)
        try:
            yield
        finally:
            self.communicator.hold(False)

    @property
    def behind(self) -> int:
        """Steps that the others have finished and this rank has not (CLOCKS.md rule 20)."""
        return self.communicator.behind if self.communicator is not None else 0

    def apply_finished(
        self, optimizer: torch.optim.Optimizer | None = None, *, step: Callable[[], object] | None = None
    ) -> int:
        """Applies the steps that the others have finished, without computing them; between two steps.

        Args:
            optimizer: default: every optimizer that steps the model's parameters.
            step: what to do once the averages are in ``.grad``, instead of ``optimizer.step()``: whatever the training
                loop does between ``backward`` and the next step (clipping, the scheduler).

        Returns:
            How many steps were applied; ``.grad`` is what it was before.

        Raises:
            ConfigError: no optimizer is known.
            TailboundError: see ``allreduce_hook``.
        """
        if self.communicator is None:
            return 0
        self.boundary()
        default = optimizer.step if optimizer is not None else lambda: away.step_optimizers(self)
        return away.apply_finished(self, self.communicator, step or default)

    def jump(self, timeout: float = 30.0) -> int:
        """If this rank is lost (``communicator.lost``), joins the others at their next step and takes their state.

        Until the state is there, the rank takes part without contributing. To be called between two steps.

        Returns:
            How many steps were skipped; 0 if it is not lost.

        Raises:
            TransportError: no live rank could say where to join.
        """
        if self.communicator is None or not self.communicator.lost:
            return 0
        self.boundary()
        return away.jump(self, self.communicator, timeout)

    def forget_late(self) -> None:
        """Drops gradients kept for the next step: it is another one now."""
        for bucket in self._buckets.values():
            bucket.carried = None

    def _bucket(self, index: int, tensor: torch.Tensor) -> _Bucket:
        return self.memory(index, tensor.numel(), tensor.dtype)

    def memory(self, index: int, numel: int, dtype: torch.dtype) -> _Bucket:
        """Memory of bucket ``index``, made anew if it is another one now."""
        found = self._buckets.get(index)
        # DDP builds its buckets anew after the first step: the old memory of this index goes
        if found is None or found.result.numel() != numel or found.result.dtype != dtype:
            decoded = torch.empty(numel, dtype=torch.float32)
            if dtype == torch.float32:
                found = _Bucket(None, decoded, decoded)
            else:
                found = _Bucket(torch.empty_like(decoded), decoded, torch.empty(numel, dtype=dtype))
            self._buckets[index] = found
        return found

    def note(self, outcome: Outcome) -> None:
        """Takes in what became of a bucket, and warns."""
        self.last = outcome
        if self.resync is not None:
            self.resync.note_missing(outcome.missed)
        self._warned &= outcome.missing | {self.rank}  # who is back and goes again is named again
        new = outcome.missing - self._warned
        if outcome.abstained and self.rank not in self._warned:
            self._warned.add(self.rank)
            log.warning("rank %d: a gradient has NaN or Inf values; this rank abstains from such ops", self.rank)
        if new:
            self._warned |= new
            log.warning("rank %d: nothing from rank(s) %s in op %#x", self.rank, sorted(new), outcome.label)
        if outcome.failed_groups:
            self._complain("parts of a gradient are zero, since no rank's rows of them came in time")
        if outcome.overwritten:
            self._complain("results were overwritten before use: give a larger ring_mib")
        if outcome.late and not outcome.abstained:
            self._complain("this rank was too late with its gradient; the average is that of the others")

    def _complain(self, what: str) -> None:
        """Warns at the 1st, 10th, 100th ... time."""
        self._complaints[what] += 1
        times = self._complaints[what]
        if times in (1, 10, 100) or times % 1000 == 0:
            log.warning("rank %d: %s (%d times so far)", self.rank, what, times)


class _Copy:
    """Copies a bucket of another type into float32 memory, in the transport thread."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._target, self._source = target, source

    def __call__(self) -> None:
        self._target.copy_(self._source)


class _Carry:
    """Averages a carried gradient with the present one, in the transport thread (CODEC.md rule 15)."""

    def __init__(self, carried: torch.Tensor, present: torch.Tensor) -> None:
        self._carried, self._present = carried, present

    def __call__(self) -> None:
        self._carried.add_(self._present).mul_(0.5)


def model_digest(model: torch.nn.Module) -> str:
    """Digest of names, shapes and types of the trainable parameters, in order."""
    parts = [f"{n}:{tuple(p.shape)}:{p.dtype}" for n, p in model.named_parameters() if p.requires_grad]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def _port() -> int:
    text = os.environ.get("TAILBOUND_PORT", str(DEFAULT_PORT))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"TAILBOUND_PORT is {text!r}: give a UDP port number") from None


def _check(index: int, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided:
        raise ConfigError(f"bucket {index} is {tensor.layout}: sparse gradients are not supported; use sparse=False")
    if tensor.device.type != "cpu":
        raise ConfigError(f"bucket {index} is on {tensor.device}: only CPU tensors are supported yet")
    if tensor.dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise ConfigError(f"bucket {index} has dtype {tensor.dtype}: supported are {names}")
