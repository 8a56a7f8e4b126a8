"""What the processes of the tests of a quorum, and of the way back to plain DDP, do; one function a job."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import torch_jobs as jobs
from resync_jobs import SETTINGS
from support import Trouble
from tailbound.errors import ConfigError
from tailbound.torch import batches, register

#: Steps before the network breaks; seconds for which it is broken.
CALM, BROKEN = 6, 5.0
#: Steps that are left, of a job that goes on meanwhile, for who was cut off to take part in.
AFTER = 60


def cut(rank: int, part: set[int], trained: set[int], steps: int) -> None:
    """For some seconds no packet passes between ``part`` and the other ranks; only ``trained`` train meanwhile.

    Weights, momentum and the count of steps of the others stay, and the loss scale sees no overflow. TCP passes, but no
    rank asks for state by it meanwhile.
    """
    scaler = torch.amp.GradScaler("cpu")
    settings = jobs.patient(SETTINGS, patience=8.0, deadline_ms=(150.0, 150.0), resync_share=0.0)
    with jobs.training(own={"weight_decay": 0.1}, scaler=scaler, **settings) as (net, optimizer, state):
        mended, held = threading.Event(), []
        for step in batches(range(steps), state):
            if step == CALM:
                jobs.everywhere(step)
                others = set(range(dist.get_world_size())) - part if rank in part else part
                trouble = Trouble(seed=1, loss=1.0, to=frozenset(others)).attach(state.communicator)
                mend = threading.Timer(BROKEN, _mend, (trouble, mended))
                mend.start()
            if step == steps - AFTER:
                mended.wait()
            optimizer.zero_grad()
            scaler.scale(jobs.loss(net, rank, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            if step >= CALM - 1 and not mended.is_set():
                held.append(jobs.state_digest(net, optimizer))
            time.sleep(0.02)
        mend.join()
        assert state.synchronize(60)
        stats = state.stats()
    assert len(held) > 1
    assert (len(set(held)) > 1) == (rank in trained)
    if rank not in trained:
        assert stats["counters"].get("ops_minority", 0)
        assert stats["event_counts"]["no_quorum"] == stats["event_counts"]["quorum"] == 1
    assert jobs.same_everywhere(jobs.state_digest(net, optimizer))
    assert scaler.get_scale() == 2.0**16


def _mend(trouble: Trouble, mended: threading.Event) -> None:
    trouble.detach()
    mended.set()


def detached(rank: int) -> None:
    """Some steps over Tailbound, then some of plain DDP, in one loop.

    Gradients are the exact mean of all ranks then; nothing is sent any more, and calls that need the job say so.
    """
    net, plain = (DDP(jobs.model(), bucket_cap_mb=0.05) for _ in range(2))
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    state = register(net, optimizer=optimizer, scaler=scaler, **SETTINGS)
    for step in batches(range(10), state):
        jobs.passes([net], rank, step)
        if step >= 5:
            with state.hold():
                plain.load_state_dict(net.state_dict())
                jobs.passes([plain], rank, step)
                assert jobs.nmse(jobs.gradient(net), jobs.gradient(plain)) < 1e-12
        optimizer.step()
        state.boundary()
        if step == 4:
            if rank == 1:  # as of a rank that was away while the others overflowed
                scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**10})
            assert state.detach()
            ops = state.stats()["counters"]["ops"]
    for call in (state.synchronize, state.catch_up, state.detach):
        with pytest.raises(ConfigError, match=f"{call.__name__}.*was detached"):
            call()
    assert state.stats()["counters"]["ops"] == ops
    state.close()
    assert scaler.get_scale() == 2.0**16
    assert jobs.same_everywhere(jobs.state_digest(net, optimizer))
