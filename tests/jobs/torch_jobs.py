"""What the processes of the PyTorch tests do; one function a job, several checks in each, since processes are dear."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tailbound.collective import report
from tailbound.errors import ConfigError, LayoutError
from tailbound.settings.table import ADVANCED
from tailbound.torch import TailboundState, allreduce_hook, register
from tailbound.torch.register import _SYNC_OPTION

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


def model(seed: int = 0) -> nn.Module:
    """About 50,000 parameters in 8 tensors of unequal sizes."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 32), nn.Tanh(), nn.Linear(32, 10)
    )


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, 32, generator=generator).to(dtype), torch.randint(0, 10, (16,), generator=generator)


def backward(net: nn.Module, rank: int, step: int, dtype: torch.dtype = torch.float32) -> None:
    data, target = batch(rank, step, dtype)
    nn.functional.cross_entropy(net(data).float(), target).backward()


def gradient(net: nn.Module) -> torch.Tensor:
    """All gradients in one float64 vector."""
    return torch.cat([p.grad.double().flatten() for p in net.parameters()])


def digest(net: nn.Module) -> str:
    return hashlib.sha256(gradient(net).numpy().tobytes()).hexdigest()


def nmse(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value - exact).square().sum() / exact.square().sum())


def same_everywhere(value: Any) -> bool:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return all(other == everyone[0] for other in everyone)


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
    "multicast_group": ("239.1.2.3", "239.1.2.4"),
    "result": ("peers", "multicast"),
    "resync_period": (200, 100),
    "safeguard": ("skip=0.5", "skip=0.25"),
    "share_rows": (True, False),
}

#: Of every step compared in this process; the bound is for their mean.
errors: list[float] = []


def check_step(plain: DDP, ours: DDP, rank: int, step: int, dtype: torch.dtype = torch.float32) -> None:
    """One backward pass of both; gradients alike within the bound, and bits equal on all ranks."""
    for net in (plain, ours):
        net.zero_grad()
        backward(net, rank, step, dtype)
    errors.append(nmse(gradient(ours), gradient(plain)))
    assert errors[-1] <= 3 * BOUND, f"step {step}: NMSE {errors[-1]}"
    assert all(p.grad.dtype == dtype for p in ours.parameters())
    assert same_everywhere(digest(ours)), f"step {step}: ranks have other bits"


def parity(rank: int) -> dict[str, Any]:
    """Gradients under the hook against plain DDP's: types, buckets, views, accumulation."""
    with pair(bucket_cap_mb=0.05) as (plain, ours, state):
        for step in range(5):
            check_step(plain, ours, rank, step)
            assert state.last.error is None
        first = state.stats()
        assert (
            first.keys() - {"replica", "history", "device_codec"} == report.alone().keys()
        )  # what a world of one says
        keys = sorted({(index, numel) for index, numel, *_ in state.communicator.job.exponents})
    assert len({numel for _, numel in keys}) > 2, keys  # step 0 had one bucket, later ones several
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        with pair(dtype, bucket_cap_mb=0.05, gradient_as_bucket_view=True) as (plain, ours, _):
            for step in range(3):
                check_step(plain, ours, rank, step, dtype)
    with pair(gradient_as_bucket_view=True, bucket_cap_mb=0.05) as (plain, ours, _):
        for step in range(3):
            check_step(plain, ours, rank, step)
    with pair(static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=0.05) as (plain, ours, _):
        for step in range(4):
            check_step(plain, ours, rank, step)
    with pair(bucket_cap_mb=0.05) as (plain, ours, state):
        for step in range(3):
            ops = state.stats()["counters"].get("ops", 0)
            for net in (plain, ours):
                net.zero_grad()
                with net.no_sync():
                    backward(net, rank, 10 * step)
            assert state.stats()["counters"].get("ops", 0) == ops
            for net in (plain, ours):
                backward(net, rank, 10 * step + 1)
            errors.append(nmse(gradient(ours), gradient(plain)))
            assert same_everywhere(digest(ours))
        late = gradient(ours).clone()
        state.communicator.drain()
        assert torch.equal(late, gradient(ours))  # nothing is written into ``.grad`` once backward is over
    assert sum(errors) / len(errors) <= BOUND, errors
    return first


def abstaining(rank: int) -> list[bool]:
    """NaN on one rank: finite and equal everywhere, the mean of the others; on all: zeros, and then as usual."""
    out = []
    ours = DDP(model())
    with register(ours, **PATIENT) as state:
        for step, ill in enumerate([set(), {1}, set(), {0, 1, 2}, set(), {1}]):
            ours.zero_grad()
            data, target = batch(rank, step)
            loss = nn.functional.cross_entropy(ours(data), target)
            (loss * (float("nan") if rank in ill else 1.0)).backward()
            out.append(state.last.abstained)
            value = gradient(ours)
            assert value.isfinite().all()
            assert same_everywhere(digest(ours))
            well = [r for r in range(3) if r not in ill]
            exact = torch.zeros_like(value)
            for other in well:
                alone = model()
                backward(alone, other, step)
                exact += gradient(alone) / len(well)
            assert nmse(value, exact) <= 3 * BOUND if well else not value.any()
        assert state.stats()["suspects"] == []
    return out


def refusals(rank: int) -> None:
    """Everything that cannot be is said before a step, or in it, by an error that says what to do."""

    def refused(error: type[Exception], words: str, action: Any) -> None:
        said = None
        try:
            action()
        except error as caught:
            said = str(caught)
        assert said is not None, f"no {error.__name__} with {words!r}"
        assert words in said, f"{words!r} not in {said}"

    refused(ConfigError, "not Sequential", lambda: register(model()))
    refused(ConfigError, "rdma", lambda: register(DDP(model()), datapath="rdma"))
    refused(ConfigError, "no interface 'nosuch0'", lambda: register(DDP(model()), interface="nosuch0"))
    refused(ConfigError, "port= is 70000", lambda: register(DDP(model()), port=70000))
    for option in ({"resync_period": -1}, {"resync_share": -0.5}):
        refused(ConfigError, next(iter(option)), lambda option=option: register(DDP(model()), advanced=option))
    slow = patient(deadline_ms=(5000.0, 10.0))
    refused(ConfigError, "4194.24 ms at most", lambda: register(DDP(model()), **slow))
    os.environ["TAILBOUND_PORT"] = "five"
    refused(ConfigError, "TAILBOUND_PORT is 'five'", lambda: register(DDP(model())))
    del os.environ["TAILBOUND_PORT"]

    def other_models() -> None:
        state_of = nn.Linear(4 + rank, 2)
        from tailbound.torch.state import model_digest

        TailboundState(model=model_digest(state_of), **PATIENT)

    refused(LayoutError, "train the same model", other_models)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + rank))
    words = f"with a loss scale of {256 << rank}'"
    refused(LayoutError, words, lambda: register(DDP(model()), scaler=scaler, **PATIENT))
    for name, values in DIFFERING.items():
        words, beside = f"rank {rank} has {name}=", {"result": "multicast"} if name == "multicast_group" else {}
        given = patient(**beside, **{name: values[rank > 0]})
        refused(LayoutError, words, lambda given=given: TailboundState(**given))
    with TailboundState(**patient(insist=0.2 + rank, patience=26.0 + rank)) as state:  # not compared
        state.average(0, torch.ones(3), True).wait()
    with TailboundState(**PATIENT) as state:
        refused(ConfigError, "optimize_ddp", lambda: allreduce_hook(state, (torch.zeros(3),)))
        refused(ConfigError, "dtype torch.int64", lambda: state.average(0, torch.zeros(3, dtype=torch.int64), True))
        refused(ConfigError, "sparse", lambda: state.average(0, torch.zeros(3, 3).to_sparse(), True))
        refused(ConfigError, "on meta", lambda: state.average(0, torch.zeros(3, device="meta"), True))
    refused(Exception, "transport is closed", lambda: state.average(0, torch.zeros(3), True))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), find_unused_parameters=True)
        register(net, **PATIENT).close()
        texts = [str(w.message) for w in caught]
        assert any("_buffers=False to Dist" in text for text in texts), texts
        assert any("find_unused_parameters=False" in text for text in texts), texts
        assert all("register" not in w.filename for w in caught if "DDP" in str(w.message))  # it points at the caller
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        option = {_SYNC_OPTION: False}
        register(DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), **option), **PATIENT).close()


def from_environment(rank: int) -> dict[str, Any]:
    """Options come from the environment where nobody gives them."""
    given = {
        "DATAPATH": "udp", "RING_MIB": "2", "DEADLINE_MS": "1500,1600", "SHARE_ROWS": "off",
        "SAFEGUARD": "skip=0.5", "BITS": "4,8", "RESULT": "peers", "TIMEOUT": "60",
        "PATIENCE": "wan", "HOLD_MAX": "90.5", "MTU": "1200",
    }  # fmt: skip
    os.environ |= {f"TAILBOUND_{name}": text for name, text in given.items()}
    with register(DDP(model()), ring_mib=4.0, bits=16) as state:
        assert state.communicator is not None
        config = state.communicator.config
        return {
            "datapath": state.communicator.datapath, "ring": config.ring_mib,
            "deadlines": (config.deadline_1, config.deadline_2), "share": config.share_rows,
            "skip": config.safeguard.skip, "bits": state.bits, "result": config.result,
            "patience": (config.start_max, config.stage_max, config.insist, config.hold_max), "width": config.width,
        }  # fmt: skip


def other_layout(rank: int) -> str:
    """A rank whose bucket has another size in the same op: ``backward`` fails on both with both named."""
    with TailboundState(**patient(deadline_ms=(200.0, 200.0))) as state:
        future = state.average(0, torch.ones(100 + 50 * rank), True)
        try:
            future.wait()
        except Exception as error:
            said = str(error)
        else:
            said = ""
        try:
            state.average(0, torch.ones(100), True).wait()
        except LayoutError as error:
            return said + " | " + str(error)
        raise AssertionError("no LayoutError")


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def ended_by_deadlines(state: TailboundState) -> int:
    """Halves of ops that deadlines have ended so far."""
    counters = state.stats()["counters"]
    return sum(counters.get(name, 0) for name in ("seal_deadline_hits", "result_deadline_hits"))


def killed(rank: int, victim: int, ready: Any, die: Any) -> tuple[list[str], list[int], dict[str, Any]]:
    """Trains on; ``victim`` says that it is under way and waits to be killed.

    Returns what the others log, and by step how many halves of ops deadlines have ended so far. A step is one op.
    """
    messages = Messages()
    logging.getLogger("tailbound").addHandler(messages)
    ours = DDP(model())
    optimizer = torch.optim.SGD(ours.parameters(), 0.05)
    state = register(ours, optimizer=optimizer, **PATIENT)
    ended = []
    for step in range(16):
        if step == 4 and rank == victim:
            ready.set()
            die.wait()  # never set: SIGKILL comes here, between two steps
        optimizer.zero_grad()
        backward(ours, rank, step)
        optimizer.step()
        ended.append(ended_by_deadlines(state))
    stats = state.stats()
    state.close()
    return messages.texts, ended, stats
