"""Buckets and results given to the compiled passes and to a device's coder: the same bytes must come."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.codec import decode as host_decode
from tailbound.codec import encode as host
from tailbound.codec.decode import MISSING, own_source
from tailbound.codec.feedback import read_back
from tailbound.codec.owners import OwnerMap, place
from tailbound.codec.records import NO_COUNTS, Coding, Packets, Received, Scales
from tailbound.codec.scale import weights_of
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import Shape, shape_for
from tailbound.wire.bits import Bits
from tailbound.wire.tag import NO_KEY

SCRATCH = Scratch(2816)
#: One group and many, rows short and whole, groups of 16, 32 and 64 rows, the last one full and nearly empty.
SIZES = [1, 256, 1000, 22529, 40000, 90112, 721001]
#: Sizes of a bucket's tensors.
TENSORS: list[tuple[int, ...]] = [
    (100,),
    (5000, 3),
    (1408, 1409, 3, 100 * 1408, 64 * 1408 * 2 + 17, 700, 127 * 1408 + 5),
    (17 * 64 * 7, 9, 9, 9),
]
DTYPES = ["float32", "bfloat16", "float16", "float64"]
SEED, WEIGHTS = 12345, weights_of(4)


def workspace(device: str = "cpu", form: Any = None) -> Any:
    """Imports torch only here, so that tests can be collected without it; ``form``: by default the plain one."""
    import torch

    from plain_form import PLAIN
    from tailbound.torch.paths import DevicePath
    from tailbound.torch.streams import CudaStream, Stream

    where = torch.device(device)
    return DevicePath(CudaStream(where) if where.type == "cuda" else Stream(where), form or PLAIN)


def coder(device: str = "cpu", form: Any = None) -> Any:
    """For tensors that are ready already."""
    from tailbound.torch.device_coder import DeviceCoder

    space = workspace(device, form)
    return DeviceCoder(space, space.stream.mark())


class Event:
    """Of a device that is slow: done when it is waited for, or when it is said to be."""

    def __init__(self) -> None:
        self.done, self.waited = False, False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = self.waited = True


def slow_stream() -> Any:
    """A stream of the host that notes what is asked of it."""
    import torch

    from tailbound.torch.streams import Stream

    class Slow(Stream):
        def __init__(self) -> None:
            super().__init__(torch.device("cpu"))
            self.events: list[Event] = []
            self.marks: list[Any] = []
            self.sizes: list[int] = []

        def use(self, mark: Any = None) -> Any:
            self.marks.append(mark)
            return super().use()

        def event(self) -> Any:
            self.events.append(Event())
            return self.events[-1]

        def host_memory(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
            made = super().host_memory(*shape, dtype=dtype)
            self.sizes.append(made.nbytes)
            return made

    return Slow()


def shapes_of(width: int, bits: Bits = 8) -> list[Shape]:
    """Shapes of ``SIZES`` and of ``TENSORS``."""
    flat = [shape_for(numel, width, bits) for numel in SIZES]
    return flat + [shape_for(sum(sizes), width, bits, sizes) for sizes in TENSORS]


def gaussian(numel: int, seed: int = 0, size: float = 1.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(numel) * size).astype(np.float32)


def begun(by: Any, x: Any, shape: Shape, coding: Coding) -> None:
    """A device has done what comes before coding; on the host there is nothing."""
    if hasattr(by, "prepare"):
        by.prepare(x, shape, coding)
        settle(by, coding)


def settle(by: Any, coding: Coding) -> None:
    """Waits for the device, as the engine never does."""
    by._ops[coding.seed].done.synchronize()


class Outputs:
    """What ``encode`` writes, filled with sevens before."""

    def __init__(self, shape: Shape, ranks: int = 4) -> None:
        self.placement = place(shape, OwnerMap(1, tuple(range(ranks))), ranks)
        self.packets = np.full((shape.rows, 64 + shape.codes), 7, np.uint8)
        self.partials = np.full((shape.rows, 4), 7, np.uint64)
        self.exponents, self.need = (np.full(shape.groups, 7, np.int16) for _ in range(2))
        self.scales = Scales(self.exponents, self.need, np.full(shape.groups, 7, np.uint8))
        self.done: Any = None

    def arrays(self) -> list[NDArray[Any]]:
        return [self.packets, self.partials, *self.scales]


def encoded(
    by: Any, x: Any, shape: Shape, exponents: NDArray[np.int16] | None = None, rotate: bool = True,
    key: NDArray[np.uint64] = NO_KEY,
) -> Outputs:  # fmt: skip
    """By own scales, or by ``exponents``, as for a switch."""
    out = Outputs(shape)
    if exponents is not None:
        out.exponents[:] = exponents
    packets = Packets(out.packets, out.placement.position, out.partials)
    coding = Coding(SEED, WEIGHTS if exponents is None else None, rotate, key)
    begun(by, x, shape, coding)
    while (done := by.encode(x, shape, coding, packets, out.scales, SCRATCH)) is None:
        settle(by, coding)
    out.done = done
    return out


def own_rows(out: Outputs) -> Received:
    """Coded rows as ``feedback`` reads them."""
    packets, rows = Packets(out.packets, out.placement.position, out.partials), len(out.packets)
    return read_back(packets, np.empty(rows, np.int64), np.empty(rows, np.float32))


def measured(by: Any, x: Any, shape: Shape, rotate: bool = True) -> NDArray[np.int16]:
    need = finite_need(by, x, shape, Coding(SEED, rotate=rotate))
    assert need is not None
    return need


def finite_need(by: Any, x: Any, shape: Shape, coding: Coding) -> NDArray[np.int16] | None:
    """None: not all of ``x`` is finite."""
    need = np.full(shape.groups, 7, np.int16)
    begun(by, x, shape, coding)
    return need if by.measure(x, shape, coding, need, SCRATCH) else None


def check(
    tensor: Any, shape: Shape, exponents: NDArray[np.int16] | None = None, rotate: bool = True,
    form: Any = None, key: NDArray[np.uint64] = NO_KEY,
) -> Outputs:  # fmt: skip
    """Both coders leave the same bytes everywhere: codes, checks or tags, scales, and what is left alone.

    Args:
        tensor: the bucket, of any float type, on the device to try.
        key: of the job; empty: it has none.
    """
    x, by = tensor.float().cpu().numpy(), coder(str(tensor.device), form)
    assert np.array_equal(measured(by, tensor, shape, rotate), measured(host, x, shape, rotate))
    theirs, ours = encoded(host, x, shape, exponents, rotate, key), encoded(by, tensor, shape, exponents, rotate, key)
    assert ours.done == theirs.done
    for mine, other in zip(ours.arrays(), theirs.arrays(), strict=True):
        assert np.array_equal(mine, other)
    return ours


class Results:
    """Result rows of an op: some in the ring, some the rank's own, some missing (their scales and places garbage)."""

    def __init__(self, shape: Shape, seed: int, missing: float, *, summed: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.shape, self.counts = shape, NO_COUNTS
        self.whole, shape = shape, shape.results
        codes = rng.integers(1, 256, (shape.rows, shape.codes), dtype=np.uint8)
        codes[rng.random(codes.shape) < 0.2] = 128
        self.ring = rng.integers(0, 256, (shape.rows + 5, 2 * 1408), dtype=np.uint8)
        self.own = np.zeros((shape.rows, 64 + shape.codes), np.uint8)
        self.own[:, 64:] = codes[::-1]
        self.scale = rng.uniform(1e-4, 1e-3, shape.rows).astype(np.float32)
        if not summed and shape.bits < 16:
            self.scale *= rng.choice(np.array([-1, 1], np.float32), shape.rows)
        k = np.arange(shape.rows)
        self.source = k + 5
        if summed:
            self.counts = rng.integers(1, 256, shape.rows).astype(np.uint16)
            sums = (rng.random(codes.shape) * 254 * self.counts[:, None] + self.counts[:, None]).astype(">u2")
            self.ring[5:, : 2 * shape.codes] = sums.view(np.uint8)
        else:
            self.ring[5:, : shape.codes] = codes
            self.source = np.where(k % 3 == 0, [own_source(shape.rows - 1 - row) for row in k], self.source)
        gone = rng.random(shape.rows) < missing
        self.source[gone] = MISSING
        self.scale[gone] = np.nan

    def decoded(self, by: Any, out: Any, rotate: bool) -> int:
        received = Received(self.ring, self.own, self.source, self.scale, self.counts)
        return int(by.decode(received, self.whole, Coding(SEED, rotate=rotate), out, SCRATCH))

    def check(self, rotate: bool = True, device: str = "cpu", form: Any = None) -> NDArray[np.float32]:
        """Both coders give the same bits, the signs of zeros included, and count the same groups as failed."""
        import torch

        numel = self.shape.numel
        theirs, ours = np.full(numel, np.nan, np.float32), torch.full((numel,), torch.nan, device=device)
        by = coder(device, form)
        assert self.decoded(by, ours, rotate) == self.decoded(host_decode, theirs, rotate)
        by._path.stream.join()
        assert np.array_equal(ours.cpu().numpy().view(np.uint32), theirs.view(np.uint32))
        return theirs
