"""What the processes of the tests of drifting, stopped and lost replicas do; one function a job."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import time
from typing import Any

import torch
from torch import nn

from support import Trouble
from tailbound.torch import batches
from tailbound.wire.schema import PacketType
from torch_jobs import everywhere, model, patient, train, training

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


def drifting(rank: int, share: float, losers: set[int]) -> None:
    """Results of some ranks get lost for a while; then a slice a step, or one call, undoes it.

    Parameters and the optimizer's state are equal bit by bit after a few steps, or after one call on all ranks.
    """
    normed = nn.Sequential(model(), nn.BatchNorm1d(10))
    with training(net=normed, **patient(SETTINGS, resync_share=share, insist=0)) as (net, optimizer, state):

        def told() -> tuple[Any, ...]:
            """Digests of all ranks, and which take themselves for sound."""
            own = state_digest(net, optimizer), state.stats()["replica"]["sound"]
            return tuple(zip(*everywhere(own), strict=True))

        train(net, optimizer, rank, range(4))
        trouble = Trouble(seed=5, loss=0.6 if rank in losers else 0.0, types=frozenset({PacketType.RESULT}))
        trouble.attach(state.communicator)
        for step in range(4, 60):  # until what is lost has not come again, nor been made good
            train(net, optimizer, rank, range(step, step + 1))
            digests, sound = told()
            if len(set(digests)) > 1:
                break
        assert len(set(digests)) > 1
        assert not all(sound)
        trouble.loss = 0.0
        for step in range(60, 260, 8):  # more may get lost on a loaded machine
            train(net, optimizer, rank, range(step, step + (8 if share else 1)))
            if not share:
                assert state.synchronize(60)
            digests, sound = told()
            if all(sound) or not share:
                break
        assert len(set(digests)) == 1
        assert all(sound)
        train(net, optimizer, rank, range(260, 262))
        # what has got lost anew has made its rank unsound
        assert len({digest for digest, well in zip(*told(), strict=True) if well}) <= 1
        counts = everywhere(state.stats()["replica"]["counters"])
    took = [one.get("slices_taken", 0) + one.get("whole_taken", 0) for one in counts]
    assert any(took)
    assert not all(took) or len(losers) > 1  # a rank that has missed nothing takes nothing
    assert len(losers) == 3 or not any(one.get("led", 0) for one in counts)


def stopped(
    rank: int, victim: int, ring_mib: float, away: int, steps: int, mtu: int, loss: float, ready: Any, moved: Any
) -> dict[str, Any]:  # fmt: skip
    """Trains with ``batches``; the victim stops until the others are ``away`` steps on, catches up or jumps.

    Rows are as narrow as ``mtu`` makes them; of all packets ``loss`` gets lost. All hold the same in the end.
    """
    settings = patient(SETTINGS, deadline_ms=(150.0, 150.0), ring_mib=ring_mib, mtu=mtu, resync_share=50.0)
    computed, jumped = [], []
    with training(torch.optim.SGD, 0.05, own={"momentum": 0.9}, **settings) as (net, optimizer, state):
        Trouble(seed=3, loss=loss).attach(state.communicator)
        rings = state.communicator.rings(tuple(p.numel() for p in net.parameters()))
        for step in batches(range(steps), state, on_skip=jumped.append):
            if step == 5 and rank == victim:
                ready.set()
                os.kill(os.getpid(), signal.SIGSTOP)  # SIGCONT comes from the test
            if step >= 5 + away:
                moved.set()
                time.sleep(0.02)  # the others' own computing
            train(net, optimizer, rank, [step])
            computed.append(step)
        synchronized = state.synchronize(60)
        ends = everywhere((state_digest(net, optimizer), state.stats()["replica"]["sound"], synchronized))
        assert len({digest for digest, sound, _ in ends if sound}) <= 1, ends
        assert len({digest for digest, _, well in ends if well}) == 1, ends
        stats = state.stats()
    return {"computed": len(computed), "jumped": sum(jumped), "stats": stats, "held": rings.held / rings.step}


def holding(rank: int) -> None:
    """A rank evaluates for longer than all deadlines keeping the GIL (``usleep``), and the others wait for it."""
    with training(torch.optim.SGD, 0.05, **SETTINGS) as (net, optimizer, state):
        train(net, optimizer, rank, range(4))
        before = state.stats()["counters"].get("seal_deadline_hits", 0)
        if rank == 0:
            with state.hold():
                # both deadlines, the first one moved on, are 1.05 s
                _ = ctypes.PyDLL(None).usleep(2_500_000)
        train(net, optimizer, rank, range(4, 6))
        stats = state.stats()
        assert not state.last.missing
        assert stats["suspects"] == []
        assert stats["counters"].get("seal_deadline_hits", 0) == before
