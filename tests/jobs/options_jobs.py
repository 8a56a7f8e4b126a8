"""What the processes of the tests of the algorithm's options do; one function a job."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from tailbound.torch import TailboundState, register
from tailbound.wire.bits import Bits
from torch_jobs import PATIENT, backward, digest, gradient, model, nmse, same_everywhere


def _gradients(bits: Bits, steps: range, **options: Any) -> list[float]:
    """NMSE of each step's average against plain DDP's."""
    rank, errors = dist.get_rank(), []
    plain, ours = DDP(model(), bucket_cap_mb=0.05), DDP(model(), bucket_cap_mb=0.05)
    with register(ours, bits=bits, **options, **PATIENT) as state:
        for step in steps:
            for net in (plain, ours):
                net.zero_grad()
                backward(net, rank, step)
            errors.append(nmse(gradient(ours), gradient(plain)))
            assert same_everywhere(digest(ours)), step
            assert state.last.error is None
    return errors


def any_bits(rank: int) -> dict[str, list[float]]:
    """The average at every number of bits, with and without error feedback."""
    return {
        "16": _gradients(16, range(4)),
        "8": _gradients(8, range(4), error_feedback=True),
        "4,8": _gradients((4, 8), range(4), error_feedback=False),
    }


def switching(rank: int) -> list[float]:
    """Bits that change between steps, on all ranks alike; then on one rank alone."""
    numel, errors = 30_000, []

    def data(of: int, step: int) -> torch.Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + of))

    with TailboundState(**PATIENT) as state:
        for step, bits in enumerate((8, (4, 8), 16, 16, (4, 8), 8)):
            state.bits = bits
            out = state.average(0, data(rank, step), True).wait()
            exact = sum(data(r, step) for r in range(dist.get_world_size())) / dist.get_world_size()
            errors.append(nmse(out.double(), exact.double()))
        state.bits = 16 if rank else 8
        with pytest.raises(Exception, match="disagree"):
            state.average(0, data(rank, 9), True).wait()
    return errors


def feedback(rank: int) -> dict[str, float]:
    """The same gradient again and again, in codes of 4 bits, 64 entries in one place far beyond their reach.

    Returns:
        NMSE of the mean over all steps against the exact average, with error feedback (the default) and without.
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
    return found
