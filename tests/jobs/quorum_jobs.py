"""What the processes of the tests of a quorum, and of the way back to plain DDP, do; one function a job."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from resync_jobs import SETTINGS, everywhere, state_digest
from support import Trouble
from tailbound.errors import ConfigError
from tailbound.torch import batches, register
from torch_jobs import backward, batch, model, patient

#: Steps before the network breaks; seconds for which it is broken.
CALM, BROKEN = 6, 5.0
#: Steps that are left, of a job that goes on meanwhile, for who was cut off to take part in.
AFTER = 60


def cut(rank: int, part: set[int], steps: int) -> dict[str, Any]:
    """Trains with a loss scale; for some seconds no packet passes between ``part`` and the other ranks.

    TCP passes, but no rank asks for state by it meanwhile.
    """
    net = DDP(model(), bucket_cap_mb=0.05)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu")
    settings = patient(SETTINGS, patience=8.0, deadline_ms=(150.0, 150.0), resync_share=0.0)
    with register(net, optimizer=optimizer, scaler=scaler, **settings) as state:
        assert state.communicator is not None
        mended, held = threading.Event(), []
        for step in batches(range(steps), state):
            if step == CALM:
                everywhere(step)
                others = set(range(dist.get_world_size())) - part if rank in part else part
                trouble = Trouble(seed=1, loss=1.0, to=frozenset(others)).attach(state.communicator)
                mend = threading.Timer(BROKEN, _mend, (trouble, mended))
                mend.start()
            if step == steps - AFTER:
                mended.wait()
            optimizer.zero_grad()
            data, target = batch(rank, step)
            scaler.scale(nn.functional.cross_entropy(net(data), target)).backward()
            scaler.step(optimizer)
            scaler.update()
            if step >= CALM - 1 and not mended.is_set():
                held.append(state_digest(net, optimizer))
            time.sleep(0.02)
        mend.join()
        well = state.synchronize(60)
        stats = state.stats()
        return {
            "held": held, "well": well, "end": state_digest(net, optimizer), "scale": scaler.get_scale(),
            "void": stats["counters"].get("ops_minority", 0), "events": stats["event_counts"],
        }  # fmt: skip


def _mend(trouble: Trouble, mended: threading.Event) -> None:
    trouble.detach()
    mended.set()


def detached(rank: int) -> dict[str, Any]:
    """Some steps over Tailbound, then some of plain DDP, in one loop."""
    net = DDP(model(), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    state = register(net, optimizer=optimizer, scaler=scaler, **SETTINGS)
    apart, well = [], False
    for step in batches(range(10), state):
        optimizer.zero_grad()
        backward(net, rank, step)
        if step >= 5:
            with state.hold():
                apart.append(_apart(net, rank, step))
        optimizer.step()
        state.boundary()
        if step == 4:
            if rank == 1:  # as of a rank that was away while the others overflowed
                scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**10})
            well = state.detach()
            ops = state.stats()["counters"]["ops"]
    for call in (state.synchronize, state.catch_up, state.detach):
        with pytest.raises(ConfigError, match=f"{call.__name__}.*was detached"):
            call()
    ran = state.stats()["counters"]["ops"] - ops
    state.close()
    scales = everywhere(scaler.get_scale())
    return {
        "well": well,
        "apart": apart,
        "ran": ran,
        "held": everywhere(state_digest(net, optimizer)),
        "scales": scales,
    }


def _apart(net: DDP, rank: int, step: int) -> float:
    """How far the gradients are from the exact mean of all ranks."""
    alone = copy.deepcopy(net.module)
    alone.zero_grad()
    backward(alone, rank, step)
    most = 0.0
    for own, averaged in zip(alone.parameters(), net.parameters(), strict=True):
        dist.all_reduce(own.grad)
        most = max(most, float((own.grad / dist.get_world_size() - averaged.grad).abs().max()))
    return most
