"""What the processes of the PyTorch tests do; one function a job, several checks in each, since processes are dear."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tailbound.collective import report
from tailbound.errors import ConfigError, LayoutError, TransportError
from tailbound.settings.table import ADVANCED
from tailbound.torch import TailboundState, allreduce_hook, register
from tailbound.torch.state import model_digest

#: Long deadlines: a loaded machine must lose nothing where a test compares.
PATIENT: dict[str, Any] = {
    "patience": 26.0, "ring_mib": 8.0, "datapath": "udp", "timeout": 60.0,
    "advanced": {"deadline_ms": (4000.0, 10_000.0)},
}  # fmt: skip
#: Bound of codec-17 for gradients of real nets.
BOUND = 4e-3


def patient(given: dict[str, Any] = PATIENT, /, **more: Any) -> dict[str, Any]:
    """Options, with ``more`` of them, each where it belongs."""
    advanced = {name: more.pop(name) for name in ADVANCED if name in more}
    return {**given, **more, "advanced": given["advanced"] | advanced}


def on_hosts(rank: int, here: int) -> dict[str, Any]:
    """Options of a job with ``here`` ranks on each host, which torchrun's variables name from now on."""
    os.environ |= {"LOCAL_RANK": str(rank % here), "LOCAL_WORLD_SIZE": str(here)}
    return {"node_group": "auto"} if here > 1 else {}


def refused(words: str, action: Callable[[], object], error: type[Exception] = ConfigError) -> str:
    """The text of the error that ``action`` ends with; it has ``words`` in it."""
    with pytest.raises(error) as caught:
        action()
    assert words in str(caught.value), str(caught.value)
    return str(caught.value)


def model(seed: int = 0) -> nn.Module:
    """About 50,000 parameters in 8 tensors of unequal sizes."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 32), nn.Tanh(), nn.Linear(32, 10)
    )


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, 32, generator=generator).to(dtype), torch.randint(0, 10, (16,), generator=generator)


def loss(net: nn.Module, rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    where = next(net.parameters()).device
    data, target = (value.to(where) for value in batch(rank, step, dtype))
    return nn.functional.cross_entropy(net(data).float(), target)


def backward(net: nn.Module, rank: int, step: int, dtype: torch.dtype = torch.float32) -> None:
    loss(net, rank, step, dtype).backward()


def passes(nets: Iterable[nn.Module], rank: int, step: int, dtype: torch.dtype = torch.float32) -> None:
    """A backward pass of each of ``nets``, by the same batch."""
    for net in nets:
        net.zero_grad()
        backward(net, rank, step, dtype)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(net, rank, step)
        optimizer.step()


@contextlib.contextmanager
def training(
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    rate: float = 1e-3,
    *,
    net: nn.Module | None = None,
    own: Mapping[str, float] = {},
    **options: Any,
) -> Iterator[tuple[DDP, torch.optim.Optimizer, TailboundState]]:
    """A model of several buckets with its optimizer, which takes ``own``, under Tailbound."""
    ddp = DDP(net or model(), bucket_cap_mb=0.05, broadcast_buffers=False)
    optimizer = kind(ddp.parameters(), rate, **own)
    with register(ddp, optimizer=optimizer, **options) as state:
        assert state.communicator is not None
        yield ddp, optimizer, state


def gradient(net: nn.Module) -> torch.Tensor:
    """All gradients, of all shards, in one float64 vector."""
    whole = (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in net.parameters())
    return torch.cat([part.double().flatten().cpu() for part in whole])


def digest(*values: Any) -> str:
    """Of tensors and plain values, in lists and dictionaries."""
    return hashlib.sha256(b"".join(_bytes(values))).hexdigest()


def _bytes(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield value.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, dict):
        yield from _bytes(sorted(value.items(), key=str))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _bytes(one)
    else:
        yield repr(value).encode()


def held(net: nn.Module) -> str:
    """Digest of parameters and buffers."""
    return digest(net.state_dict())


def state_digest(net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Over parameters and everything the optimizer keeps (running statistics of batches are every rank's own)."""
    return digest([(p, optimizer.state.get(p, {})) for p in net.parameters()])


def nmse(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value - exact).square().sum() / exact.square().sum())


def everywhere(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks, which wait for each other in here: for what all have to decide, or after the end."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group)
    return everyone


def same_everywhere(value: Any, group: dist.ProcessGroup | None = None) -> bool:
    first, *others = everywhere(value, group)
    return all(other == first for other in others)


def alike(ours: nn.Module, plain: nn.Module) -> None:
    """Gradients of ``ours`` are those of ``plain`` within the bound, and the same bits on all ranks."""
    error = nmse(gradient(ours), gradient(plain))
    assert error <= 3 * BOUND, error
    assert same_everywhere(digest(gradient(ours)))


@contextlib.contextmanager
def pair(dtype: torch.dtype = torch.float32, **options: Any) -> Iterator[tuple[DDP, DDP, TailboundState]]:
    """The same model twice: under plain DDP over Gloo, and under Tailbound."""
    plain = DDP(model().to(dtype), **options)
    ours = DDP(model().to(dtype), **options)
    with register(ours, **PATIENT) as state:
        yield plain, ours, state


#: Options that are compared before the first step (``docs/torch/options.md``), with what two ranks give that differ.
DIFFERING: dict[str, tuple[Any, Any]] = {
    "bits": (8, (4, 8)),
    "error_feedback": (False, True),
    "result": ("peers", "multicast"),
    "resync_period": (200, 100),
    "safeguard": ("skip=0.5", "skip=0.25"),
    "share_rows": (True, False),
}

#: Of every step compared in this process; the bound is for their mean.
errors: list[float] = []


def check_step(plain: DDP, ours: DDP, rank: int, step: int, dtype: torch.dtype = torch.float32) -> None:
    """One backward pass of both; gradients alike within the bound, and bits equal on all ranks."""
    passes((plain, ours), rank, step, dtype)
    errors.append(nmse(gradient(ours), gradient(plain)))
    alike(ours, plain)
    assert all(p.grad.dtype == dtype for p in ours.parameters())


def parity(rank: int) -> None:
    """Gradients under the hook against plain DDP's: rebuilt buckets, several of them, types, views."""
    with pair(bucket_cap_mb=0.05) as (plain, ours, state):
        for step in range(5):
            check_step(plain, ours, rank, step)
            assert state.last.error is None
        stats = state.stats()
        of_one = report.alone().keys()  # what a world of one says
        assert stats.keys() - {"replica", "history", "device_codec"} == of_one
        assert (stats["rank"], stats["delivered"]) == (rank, 1.0)
        assert set(stats["drops"]) <= {"STALE_RESULT"}  # a question may cross the end of its op
        assert stats["counters"]["ops"] > 5
        assert "," in ours._get_ddp_logging_data()["rebuilt_bucket_sizes"]  # several buckets; step 0 had one
    views = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.05}
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float32):
        with pair(dtype, **views) as (plain, ours, state):
            for step in range(3):
                check_step(plain, ours, rank, step, dtype)
            late = gradient(ours).clone()
            state.communicator.drain()
            assert torch.equal(late, gradient(ours))  # nothing is written into ``.grad`` once backward is over
    assert sum(errors) / len(errors) <= BOUND, errors


def abstaining(rank: int, here: int) -> None:
    """NaN on one rank: finite and equal everywhere, the mean of the other hosts; on all: zeros, and then as usual."""
    hosts = [set(range(first, first + here)) for first in range(0, dist.get_world_size(), here)]
    ours = DDP(model())
    with register(ours, **PATIENT, **on_hosts(rank, here)) as state:
        for step, ill in enumerate([set(), {1}, set(), {min(host) for host in hosts}, set(), {1}]):
            ours.zero_grad()
            (loss(ours, rank, step) * (float("nan") if rank in ill else 1.0)).backward()
            assert state.last.abstained == bool(hosts[rank // here] & ill), step
            value = gradient(ours)
            assert value.isfinite().all()
            assert same_everywhere(digest(gradient(ours)))
            well = [one for host in hosts if not host & ill for one in host]
            exact = torch.zeros_like(value)
            for other in well:
                alone = model()
                backward(alone, other, step)
                exact += gradient(alone) / len(well)
            assert nmse(value, exact) <= 3 * BOUND if well else not value.any(), step
        assert state.stats()["suspects"] == []


def refusals(rank: int) -> None:
    """Everything that cannot be is said before a step, or in it, by an error that says what to do."""
    refused("4194.24 ms at most", lambda: register(DDP(model()), **patient(deadline_ms=(5000.0, 10.0))))
    other = model_digest(nn.Linear(4 + rank, 2))
    refused("train the same model", lambda: TailboundState(model=other, **PATIENT), LayoutError)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + rank))
    scales = f"with a loss scale of {256 << rank}'"
    refused(scales, lambda: register(DDP(model()), scaler=scaler, **PATIENT), LayoutError)
    net = DDP(model())
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    if rank == 0:  # alone loads a checkpoint: most ranks' empty state won, with a warning of memory errors
        net.zero_grad()
        backward(net.module, rank, 0)
        optimizer.step()
    refusal = refused("optimizer that has loaded 8 states", lambda: register(net, optimizer, **PATIENT), LayoutError)
    assert "load a checkpoint on every rank before register" in refusal
    for name, values in DIFFERING.items():
        given = patient(**{name: values[rank > 0]})
        refused(f"rank {rank} has {name}=", lambda given=given: TailboundState(**given), LayoutError)
    with TailboundState(**patient(insist=0.2 + rank, patience=26.0 + rank)) as state:  # not compared
        state.average(0, torch.ones(3), True).wait()
    with TailboundState(**PATIENT) as state:
        refused("optimize_ddp", lambda: allreduce_hook(state, (torch.zeros(3),)))
        refused("dtype torch.int64", lambda: state.average(0, torch.zeros(3, dtype=torch.int64), True))
        refused("sparse", lambda: state.average(0, torch.zeros(3, 3).to_sparse(), True))
        refused("on meta", lambda: state.average(0, torch.zeros(3, device="meta"), True))
    refused("transport is closed", lambda: state.average(0, torch.zeros(3), True), Exception)


def switching(rank: int) -> None:
    """Bits that change between steps, on all ranks alike; then on one rank alone."""
    numel, most = 30_000, {8: 1.5e-3, (4, 8): 0.02, 16: 1e-6}

    def data(of: int, step: int) -> torch.Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + of))

    with TailboundState(**PATIENT) as state:
        for step, bits in enumerate((8, (4, 8), 16, 16, (4, 8), 8)):
            state.bits = bits
            out = state.average(0, data(rank, step), True).wait()
            exact = sum(data(r, step) for r in range(dist.get_world_size())) / dist.get_world_size()
            assert nmse(out.double(), exact.double()) < most[bits], step
        state.bits = 16 if rank else 8
        refused("disagree", lambda: state.average(0, data(rank, 9), True).wait(), Exception)


def feedback(rank: int) -> None:
    """The same gradient again and again, in codes of 4 bits, 64 entries in one place far beyond their reach.

    With error feedback (the default) the mean over all steps comes nearer to the exact average.
    """
    numel, steps, found = 20_000, 30, {}
    data = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    data[500:564] *= 100
    exact = data.clone()
    dist.all_reduce(exact)
    exact /= dist.get_world_size()
    for name, option in (("with", None), ("without", False)):
        total = torch.zeros(numel, dtype=torch.float64)
        with TailboundState(bits=(4, 8), error_feedback=option, **PATIENT) as state:
            for _ in range(steps):
                total += state.average(0, data.clone(), True).wait().double()
        found[name] = nmse(total / steps, exact.double())
    assert found["without"] > 0.1
    assert found["with"] < found["without"] / 4


class Count:
    """Steps that a loop has made, by its own count: taken over as a scheduler is."""

    made = 0

    def state_dict(self) -> dict[str, int]:
        return {"made": self.made}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.made = state["made"]


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def failed(net: DDP, optimizer: torch.optim.Optimizer, rank: int, step: int) -> str:
    """Trains a step; what it ends with, in the bucket's future or by the hook, or nothing."""
    try:
        train(net, optimizer, rank, [step])
    except (RuntimeError, TransportError) as error:
        return str(error)
    return ""


def killed(rank: int, here: int = 1, how: str = "killed") -> dict[str, Any]:
    """The last rank dies between two steps. What the others log and hold, and what ended the job of its host.

    ``how``: it is killed or ``raises``: it catches an error in the middle of a pass, and DDP refuses the next one.
    ``ended``: by step, how many halves of ops deadlines have ended so far. A step is one op.
    """
    messages, net = Messages(), DDP(model())
    logging.getLogger("tailbound").addHandler(messages)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    ended, failure = [], ""
    with register(net, optimizer=optimizer, **on_hosts(rank, here), **PATIENT) as state:
        for step in range(16):
            if step == 4 and rank == dist.get_world_size() - 1:
                time.sleep(0.5)  # the others have what it has sent
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                handle = net.module[2].weight.register_hook(lambda _: {}[how])
                with contextlib.suppress(KeyError):
                    backward(net, rank, step)
                handle.remove()
                backward(net, rank, step)
            if failure := failed(net, optimizer, rank, step):
                break
            counters = state.stats()["counters"]
            ended.append(sum(counters.get(name, 0) for name in ("seal_deadline_hits", "result_deadline_hits")))
        suspects = state.stats()["suspects"]
    return {"ended": ended, "said": failure, "texts": messages.texts, "held": held(net), "suspects": suspects}
