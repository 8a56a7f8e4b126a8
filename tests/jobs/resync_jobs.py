"""What the processes of the tests of drifting, stopped and lost replicas do; one function a job."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from support import Trouble
from tailbound.torch import TailboundState, batches, register
from tailbound.torch.register import _SYNC_OPTION
from tailbound.wire.schema import PacketType
from torch_jobs import backward, model, patient

#: Deadlines that a loaded machine meets as a rule; what it misses is repaired by what is tested here.
SETTINGS: dict[str, Any] = {
    "ring_mib": 8.0,
    "datapath": "udp",
    "timeout": 60.0,
    # what is kept for a rank that stands still is refused by it where maps change meanwhile
    "advanced": {"deadline_ms": (500.0, 500.0), "share_rows": False},
}


def state_digest(net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Over parameters and everything the optimizer keeps (running statistics of batches are every rank's own)."""
    out = hashlib.sha256()
    for p in net.parameters():
        out.update(p.detach().numpy().tobytes())
        for name, value in sorted(optimizer.state[p].items()):
            out.update(name.encode())
            out.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else str(value).encode())
    return out.hexdigest()


def train(net: DDP, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(net, rank, step)
        optimizer.step()


def lose_results(state: TailboundState, loss: float) -> Trouble:
    """From now on this rank's results get lost on their way."""
    assert state.communicator is not None
    return Trouble(seed=5, loss=loss, types=frozenset({PacketType.RESULT})).attach(state.communicator)


def everywhere(value: Any) -> list[Any]:
    """The values of all ranks, which wait for each other in here: for what all have to decide, or after the end."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def drifting(rank: int, share: float, losers: set[int]) -> dict[str, Any]:
    """Results of some ranks get lost for a while; then a slice a step, or one call, undoes it."""
    normed = nn.Sequential(model(), nn.BatchNorm1d(10))
    net = DDP(normed, **{_SYNC_OPTION: False}, bucket_cap_mb=0.05)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    with register(net, optimizer=optimizer, **patient(SETTINGS, resync_share=share, insist=0)) as state:
        train(net, optimizer, rank, range(4))
        trouble = lose_results(state, 0.6 if rank in losers else 0.0)
        for step in range(4, 60):  # until what is lost has not come again, nor been made good
            train(net, optimizer, rank, range(step, step + 1))
            apart = (state_digest(net, optimizer), state.stats()["replica"]["sound"])
            if len({digest for digest, _ in everywhere(apart)}) > 1:
                break
        trouble.loss = 0.0
        synchronized, together = True, []
        for step in range(60, 260, 8):  # more may get lost on a loaded machine
            if share:
                train(net, optimizer, rank, range(step, step + 8))
            else:
                train(net, optimizer, rank, range(step, step + 1))
                synchronized &= state.synchronize(60)
            together = everywhere((state_digest(net, optimizer), state.stats()["replica"]["sound"]))
            if all(sound for _, sound in together) or not share:
                break
        train(net, optimizer, rank, range(260, 262))
        after = (state_digest(net, optimizer), state.stats()["replica"]["sound"])
        stats = state.stats()
    return {
        "apart": apart, "together": together, "synchronized": synchronized, "after": after, "stats": stats,
    }  # fmt: skip


def stopped(
    rank: int, victim: int, ring_mib: float, away: int, steps: int, mtu: int, loss: float, ready: Any, moved: Any
) -> dict[str, Any]:  # fmt: skip
    """Trains with ``batches``; the victim stops until the others are ``away`` steps on, catches up or jumps.

    Rows are as narrow as ``mtu`` makes them; of all packets ``loss`` gets lost.
    """
    net = DDP(model(), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    settings = patient(SETTINGS, deadline_ms=(150.0, 150.0), ring_mib=ring_mib, mtu=mtu, resync_share=50.0)
    computed, jumped, back_at = [], [], 0.0
    with register(net, optimizer=optimizer, **settings) as state:
        assert state.communicator is not None
        Trouble(seed=3, loss=loss).attach(state.communicator)
        rings = state.communicator.rings(tuple(p.numel() for p in net.parameters()))
        for step in batches(range(steps), state, on_skip=jumped.append):
            if step == 5 and rank == victim:
                ready.set()
                os.kill(os.getpid(), signal.SIGSTOP)  # SIGCONT comes from the test
                back_at = time.monotonic()
            if step >= 5 + away:
                moved.set()
                time.sleep(0.02)  # the others' own computing
            optimizer.zero_grad()
            backward(net, rank, step)
            optimizer.step()
            computed.append(step)
        took = time.monotonic() - back_at
        behind = state.behind
        synchronized = state.synchronize(60)
        digests = everywhere((state_digest(net, optimizer), state.stats()["replica"]["sound"], synchronized))
        stats = state.stats()
    return {
        "computed": computed, "jumped": sum(jumped), "behind": behind, "took": took, "digests": digests, "stats": stats,
        "held": rings.held / rings.step,
    }  # fmt: skip


def sealed(state: TailboundState) -> int:
    """How often the first half of an op has ended at its deadline here."""
    return int(state.stats()["counters"].get("seal_deadline_hits", 0))


def holding(rank: int) -> list[int]:
    """A rank evaluates for longer than all deadlines keeping the GIL, and nobody leaves it out."""
    net = DDP(model(), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    with register(net, optimizer=optimizer, **SETTINGS) as state:
        train(net, optimizer, rank, range(4))
        before = sealed(state)
        if rank == 0:
            with state.hold():
                # both deadlines, the first one moved on, are 1.05 s
                _ = ctypes.PyDLL(None).usleep(2_500_000)
        train(net, optimizer, rank, range(4, 6))
        missing = sorted(state.last.missing)
        stats = state.stats()
        assert stats["suspects"] == []
        return [len(missing), sealed(state) - before]
