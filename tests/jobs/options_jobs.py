"""What the processes of the tests of the algorithm's options do; one function a job."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from tailbound.torch import TailboundState, register
from torch_jobs import PATIENT, digest, gradient, model, nmse, passes, refused, same_everywhere


def any_bits(rank: int) -> None:
    """The average at every number of bits, with and without error feedback."""
    for bits, feedback, least, most in ((16, None, 0, 1e-6), (8, True, 1e-5, 4e-3), ((4, 8), False, 5e-3, 0.1)):
        plain, ours, found = DDP(model(), bucket_cap_mb=0.05), DDP(model(), bucket_cap_mb=0.05), []
        with register(ours, bits=bits, error_feedback=feedback, **PATIENT) as state:
            for step in range(4):
                passes((plain, ours), rank, step)
                found.append(nmse(gradient(ours), gradient(plain)))
                assert same_everywhere(digest(ours)), step
                assert state.last.error is None
        assert least < sum(found) / len(found) < most, (bits, found)


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
