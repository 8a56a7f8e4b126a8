"""State of the DDP communication hook: one communicator, and memory of its own for every bucket."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tailbound.collective.communicator import Communicator
from tailbound.collective.op import Outcome
from tailbound.errors import ConfigError, TailboundError
from tailbound.transport.config import DEFAULT_PORT, MS, Config

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


class TailboundState:
    """What ``allreduce_hook`` needs; make it with ``register`` or by hand before ``register_comm_hook``.

    Args:
        process_group: the group of the DDP model; its store is the rendezvous. Default: the default group.
        datapath: ``auto`` (``xdp`` where it can be had on ``interface``, else ``udp``), ``xdp`` or ``udp``.
        interface: network interface of this rank; default ``TAILBOUND_INTERFACE``, else the way to MASTER_ADDR.
        port: UDP port of the job, the same on all ranks; default ``TAILBOUND_PORT``, else 5515.
        ring_mib: MiB of result rows kept ready to receive; bounds how much is in flight.
        deadline_ms: how long the first half may wait for contributions after a majority has shown up, and how much
            longer the second half for results.
        hadamard: rotate, so that a lost packet costs every entry a little instead of some entries everything.
        timeout: seconds to wait for the other ranks at the start.
        model: digest of what is trained (``model_digest``); ranks that differ are refused.

    Raises:
        ConfigError, CapabilityError, AttachError, LayoutError, TransportError: before any training step.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        datapath: str = "auto",
        interface: str | None = None,
        port: int | None = None,
        ring_mib: float = 64.0,
        deadline_ms: tuple[float, float] = (100.0, 100.0),
        hadamard: bool = True,
        timeout: float = 180.0,
        model: str = "",
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
            deadline_1=int(deadline_ms[0] * MS),
            deadline_2=int(deadline_ms[1] * MS),
            rotate=hadamard,
        )
        name = f"tailbound/{group.group_name}/{_jobs}"
        _jobs += 1
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
        if bucket.source is not None:
            source, native = bucket.source, tensor.detach()
            prepare = _Copy(source, native)

        errors: list[TailboundError] = []

        def done(outcome: Outcome) -> None:
            if outcome.error is not None:
                errors.append(outcome.error)
            try:
                if bucket.result is not bucket.decoded:
                    bucket.result.copy_(bucket.decoded)
                self._note(outcome)
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
        )

        def checked(completed: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            # raising here, after completion, reaches backward() with this message; set_exception would not
            if errors:
                raise errors[0]
            return completed.value()

        return future.then(checked)

    def stats(self) -> dict[str, Any]:
        """Counters of this rank, in plain types (``tailbound.collective.report.snapshot``); empty for one rank."""
        return self.communicator.stats() if self.communicator is not None else {}

    def close(self) -> None:
        """Ends the transport thread and releases the datapath; may be called twice."""
        if self.communicator is not None:
            self.communicator.close()

    def __enter__(self) -> TailboundState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bucket(self, index: int, tensor: torch.Tensor) -> _Bucket:
        found = self._buckets.get(index)
        # DDP builds its buckets anew after the first step: the old memory of this index goes
        if found is None or found.result.numel() != tensor.numel() or found.result.dtype != tensor.dtype:
            decoded = torch.empty(tensor.numel(), dtype=torch.float32)
            if tensor.dtype == torch.float32:
                found = _Bucket(None, decoded, decoded)
            else:
                found = _Bucket(torch.empty_like(decoded), decoded, torch.empty_like(tensor))
            self._buckets[index] = found
        return found

    def _note(self, outcome: Outcome) -> None:
        self.last = outcome
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
