"""What the processes of the tests of drifting replicas, and of one that holds, do; one function a job."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
import torch
from torch import nn

from support import Trouble, launch
from tailbound.wire.schema import PacketType
from torch_jobs import everywhere, model, patient, state_digest, train, training

#: Deadlines that a loaded machine meets as a rule; what it misses is repaired by what is tested here.
SETTINGS: dict[str, Any] = {
    "ring_mib": 8.0,
    "datapath": "udp",
    "timeout": 60.0,
    # what is kept for a rank that stands still is refused by it where maps change meanwhile
    "advanced": {"deadline_ms": (500.0, 500.0), "share_rows": False},
}


def drifting(rank: int) -> None:
    """Results from rank 0 get lost for a while; then ranks that lack some take what differs, slice by slice.

    Parameters and the optimizer's state are equal bit by bit after a few steps.
    """
    normed = nn.Sequential(model(), nn.BatchNorm1d(10))
    with training(net=normed, **patient(SETTINGS, resync_share=50.0, insist=0)) as (net, optimizer, state):

        def told() -> tuple[Any, ...]:
            """Digests of all ranks, and which take themselves for sound."""
            own = state_digest(net, optimizer), state.stats()["replica"]["sound"]
            return tuple(zip(*everywhere(own), strict=True))

        train(net, optimizer, rank, range(4))
        trouble = Trouble(seed=5, loss=0.0 if rank else 0.6, types=frozenset({PacketType.RESULT}))
        trouble.attach(state.communicator)
        for step in range(4, 60):  # until what is lost has not come again, nor been made good
            train(net, optimizer, rank, [step])
            digests, sound = told()
            if len(set(digests)) > 1:
                break
        assert len(set(digests)) > 1
        assert not all(sound)
        trouble.loss = 0.0
        for step in range(60, 260, 8):  # more may get lost on a loaded machine
            train(net, optimizer, rank, range(step, step + 8))
            digests, sound = told()
            if all(sound):
                break
        assert len(set(digests)) == 1
        assert all(sound)
        counts = everywhere(state.stats()["replica"]["counters"])
    took = [one.get("slices_taken", 0) + one.get("whole_taken", 0) for one in counts]
    assert any(took)
    assert not took[0]  # a rank that has missed nothing takes nothing


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


def keeping(rank: int) -> None:
    """A rank keeps the GIL as soon as it has launched, and the others have its rows and results all the same."""
    with training(torch.optim.SGD, 0.05, **SETTINGS) as (net, optimizer, state):
        train(net, optimizer, rank, range(2))
        assert state.communicator is not None
        values = np.full(1 << 16, rank, np.float32)
        average = np.empty_like(values)
        for step in range(4):  # the layout of a step is known in the last one
            everywhere(None)
            ended: list[float] = []
            done = launch(state.communicator, values, average)
            done.add_done_callback(lambda _, ended=ended: ended.append(time.monotonic()))
            if rank == 0 and step == 3:
                ctypes.PyDLL(None).usleep(2_500_000)
                ended = [time.monotonic()]
            outcome = done.result(60.0)
            assert (outcome.expected - outcome.delivered, outcome.missing) == (0, set())
        assert np.allclose(average, 1.0, atol=0.1)
        released, *others = everywhere(ended[0])
        assert max(others) < released
