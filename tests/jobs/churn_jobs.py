"""What a rank does whose job is stopped, loses packets and is killed at random: trains, and says what it held when."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from support import Trouble
from tailbound.torch import batches, register
from torch_jobs import model, state_digest, train

#: Deadlines and rates are learned, as in any job; a rank that is stopped for seconds falls out of this ring.
SETTINGS: dict[str, Any] = {"datapath": "udp", "ring_mib": 2.0, "advanced": {"resync_share": 50.0}, "timeout": 60.0}


def churning(
    rank: int, follow: bool, spoilt: int, checkpoint: Path, loss: Any, last: Any, steps: Any
) -> dict[str, Any]:
    """Trains until step ``last`` is known and reached, from ``checkpoint`` if there is one.

    Args:
        follow: whether it goes on where the others are by ``batches``.
        spoilt: the step before which rank 1 changes a weight without a word; -1: never.
        loss: share of packets that get lost on their way, a shared double.
        last: step to synchronize before, a shared integer; -1 as long as nobody knows.
        steps: shared integers, which step each rank is in.

    Returns:
        ``seen``: by step, the digest of the state before it and whether the rank is sound; ``digest``, ``synchronized``
        and ``state`` after synchronizing; ``first``: the digest of what it began with; ``counters``.
    """
    parent = os.getppid()
    net = DDP(model(), bucket_cap_mb=0.05)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        net.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    first = state_digest(net, optimizer)
    seen: dict[int, tuple[str, bool]] = {}
    with register(net, optimizer=optimizer, **SETTINGS) as state:
        communicator = state.communicator
        assert communicator is not None
        trouble = Trouble(seed=rank).attach(communicator)
        for _ in batches(itertools.count(), state) if follow else itertools.count():
            step = communicator.step
            steps[rank] = step
            if 0 <= last.value <= step or os.getppid() != parent:
                break
            assert state.resync is not None
            sound = state.resync.sound  # first: peers may compare the weight that is changed as soon as it is
            if rank == 1 and step == spoilt:
                with torch.no_grad():
                    next(net.parameters()).view(-1)[0] += 1.0
            seen[step] = state_digest(net, optimizer), sound
            trouble.loss = loss.value
            train(net, optimizer, rank, [step])
        trouble.detach()
        synchronized = state.synchronize(30)
        held = {"model": net.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(held, checkpoint.with_suffix(f".{rank}"))
        return {
            "seen": seen, "first": first, "digest": state_digest(net, optimizer), "synchronized": synchronized,
            "last": steps[rank], "counters": dict(state.stats()["counters"]),
        }  # fmt: skip
