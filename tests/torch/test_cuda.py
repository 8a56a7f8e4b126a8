"""Buckets on a CUDA device: the bits of the host, streams and futures in order, only codes across.

The cases are those of the ``test_device_*`` modules, which run everywhere on host memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from device_cases import DTYPES, SIZES, Results, check, gaussian, measured, workspace
from processes import Run
from tailbound.codec import encode as host
from tailbound.codec.decode import MISSING
from tailbound.codec.scale import agreed
from tailbound.codec.shape import shape_for
from tailbound.wire.bits import Bits

pytestmark = pytest.mark.needs("torch", "CUDA device")

DEVICE = "cuda:0"


def triton() -> Any:
    from tailbound.torch.paths import triton_form

    return triton_form()


@pytest.mark.parametrize("bits", [16, 8, (4, 8)])
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_packets_are_those_of_the_host(numel: int, kind: str, bits: Bits) -> None:
    import torch

    shape = shape_for(numel, 1408, bits)
    tensor = torch.from_numpy(gaussian(numel, numel, 1e-3)).to(getattr(torch, kind))
    x = tensor.float().numpy()
    for rotate in (True, False):
        switched = agreed(measured(host, x, shape, rotate)[None])
        switched[::2] -= np.int16(numel % 37)
        for exponents in (None, switched):
            check(tensor.to(DEVICE), shape, exponents, rotate, form=triton())


@pytest.mark.parametrize(("bits", "summed"), [(16, False), (8, False), (8, True), ((4, 8), False)])
@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("numel", SIZES)
def test_averages_are_those_of_the_host(numel: int, rotate: bool, bits: Bits, summed: bool) -> None:
    results = Results(shape_for(numel, 704, bits), numel, 0.1, summed=summed)
    results.check(rotate, DEVICE, form=triton())
    results.source[:] = MISSING
    results.check(rotate, DEVICE, form=triton())


def test_the_bucket_is_read_behind_what_fills_it() -> None:
    """A long product is queued first, on which the gradient depends."""
    import torch

    from tailbound.torch.device_coder import DeviceCoder

    space = workspace(DEVICE, triton())
    shape, x = shape_for(1_000_000, 1408), torch.from_numpy(gaussian(1_000_000))
    ones = torch.ones(4096, 4096, device=DEVICE)
    kept, gradient = x.to(DEVICE), torch.zeros(1_000_000, device=DEVICE)
    torch.cuda.synchronize()
    for _ in range(20):
        ones = ones @ ones / 4096
    gradient.copy_(kept * ones[0, 0])
    by = DeviceCoder(space, space.stream.mark())
    assert np.array_equal(measured(by, gradient, shape), measured(host, x.numpy(), shape))


def test_who_waits_for_the_future_reads_the_average() -> None:
    """It is completed while the average is still being made; ``wait`` orders the waiting thread's stream behind it."""
    import torch

    from tailbound.torch.device_coder import DeviceCoder

    space = workspace(DEVICE, triton())
    results = Results(shape_for(1_000_000, 1408), 2, 0.1)
    wanted = results.check()
    out = torch.full((1_000_000,), torch.nan, device=DEVICE)
    ones = torch.ones(4096, 4096, device=DEVICE)
    future = space.stream.future()
    with space.stream.use(space.stream.mark()):
        for _ in range(20):
            ones = ones @ ones / 4096
        results.decoded(DeviceCoder(space, None), out, True)
        future.set_result(out)
    seen = future.then(lambda done: done.value() + 0.0).wait()
    assert np.array_equal(future.wait().cpu().numpy(), wanted)
    assert np.array_equal(seen.cpu().numpy(), wanted)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "float64"])
def test_training_and_synchronizing(run: Run, kind: str) -> None:
    """DDP over Gloo beside DDP with the hook, both ranks on one device; parameters and optimizer state follow."""
    run("device_jobs.train", 2, DEVICE, kind)


def test_ranks_of_a_host_share_buckets(run: Run) -> None:
    """Two hosts of two ranks: NCCL within a host, Tailbound between them."""
    run("node_jobs.parity", 4, "cuda")
