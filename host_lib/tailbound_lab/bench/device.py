"""``tailbound bench codec --device cuda``: what a bucket on a device costs, by either form and coded by the host.

Three kernels are timed by the device's own clock, queued behind a product that takes longer than queueing them:
largest values, codes, averages. Encode and decode are whole, as the engine calls them, with everything between them
and packets: the time until they are through, and the processor time of their calls. Medians of rounds in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tailbound.codec import decode as host_decode
from tailbound.codec import encode as host
from tailbound.codec.owners import OwnerMap, place
from tailbound.codec.records import Received
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import Shape, shape_for
from tailbound.errors import CapabilityError, ConfigError
from tailbound.torch.device_codec.choose import form_for
from tailbound.torch.device_codec.form import By, Form, Rows
from tailbound.torch.device_codec.plain import PLAIN
from tailbound.torch.device_coder import DeviceCoder, Workspace
from tailbound.torch.streams import CudaStream
from tailbound_lab.bench.codec import RANKS, WIDTH, coding_of, packets_of, scales_of
from tailbound_lab.bench.table import save

#: Gradients are kept in these.
TYPES = ("float32", "bfloat16")
#: Of one call: milliseconds until it is through, of the device's clock, of processor time of its calls.
Times = tuple[float | None, float | None, float | None]


class _Pass(NamedTuple):
    """Something to time.

    Attributes:
        name, form, dtype: as the row says them.
        nbytes: of memory that it has to read or write at least.
        call: does it once.
    """

    name: str
    form: str
    dtype: str
    nbytes: int
    call: Callable[[], Times]


def run(json_path: Path | None = None, *, quick: bool = False, megabytes: float = 26.2144) -> list[dict[str, Any]]:
    """Times all passes over one bucket on the first CUDA device.

    Args:
        json_path: where the rows go.
        quick: fewer rounds.
        megabytes: of the bucket in float32, 10**6 bytes.

    Returns:
        Rows ``name, form, dtype, ms, device_ms, host_ms, gbps``. ``largest``, ``codes`` and ``averages`` have the
        device's time (``device_ms``) and the memory they read and write over that time. ``encode`` and ``decode`` have
        the time from the call to the end (``ms``) and the processor time of the calls (``host_ms``); of form ``host``
        the bucket is copied to the host and coded by its compiled passes on one thread. ``copy``: on the device, as
        many bytes as the bucket has in float32; ``copy down`` and ``copy up``: its codes to page-locked memory of the
        host and back.

    Raises:
        CapabilityError: there is no CUDA device.
        ConfigError: a bucket of no entries.
    """
    numel = int(megabytes * 1e6) // 4
    if numel < 1:
        raise ConfigError(f"{megabytes} MB: give a number above 0")
    if not torch.cuda.is_available():
        raise CapabilityError("no CUDA device: install an NVIDIA driver and a PyTorch that is built for CUDA")
    passes = [*_yardsticks(numel), *(each for kind in TYPES for each in _of(numel, kind))]
    times = [[each.call() for each in passes] for _ in range(3 + (5 if quick else 31))][3:]
    rows = []
    for each, found in zip(passes, zip(*times, strict=True), strict=True):
        ms, device, calls = (
            None if None in column else float(np.median(column)) for column in zip(*found, strict=True)
        )
        span = device or ms
        rows.append(
            {
                "name": each.name, "form": each.form, "dtype": each.dtype, "ms": ms, "device_ms": device,
                "host_ms": calls, "gbps": each.nbytes / span / 1e6 if span else None,
            }
        )  # fmt: skip
    save(rows, json_path)
    return rows


class _Behind:
    """Times work by the device's clock: the host queues all of it while a product is under way before it."""

    def __init__(self) -> None:
        self._ones = torch.ones(4096, 4096, device="cuda")

    def __call__(self, work: Callable[[], Any]) -> Times:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        for _ in range(4):
            self._ones @ self._ones
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return None, begin.elapsed_time(end), None


def _yardsticks(numel: int) -> Iterator[_Pass]:
    behind, shape = _Behind(), shape_for(numel, WIDTH)
    one, other = (torch.zeros(numel, device="cuda") for _ in range(2))
    codes = torch.zeros(shape.rows, shape.codes, dtype=torch.uint8, device="cuda")
    locked = torch.zeros(codes.shape, dtype=torch.uint8, pin_memory=True)
    yield _Pass("copy", "-", "float32", 8 * numel, lambda: behind(lambda: other.copy_(one)))
    yield _Pass(
        "copy down", "-", "codes", codes.numel(), lambda: behind(lambda: locked.copy_(codes, non_blocking=True))
    )
    yield _Pass("copy up", "-", "codes", codes.numel(), lambda: behind(lambda: codes.copy_(locked, non_blocking=True)))


def _of(numel: int, kind: str) -> Iterator[_Pass]:
    """Every pass over a bucket of one type."""
    shape, rng = shape_for(numel, WIDTH), np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal(numel, np.float32)).to("cuda", getattr(torch, kind))
    op = _Op(shape, x)
    for form in dict.fromkeys((form_for(x.device), PLAIN)):
        yield from _kernels(form, op, kind)
        space = Workspace(CudaStream(torch.device("cuda", torch.cuda.current_device())), form)
        yield _Pass("encode", form.name, kind, x.nbytes, lambda space=space: op.encode(space))  # type: ignore[misc]
        yield _Pass("decode", form.name, kind, x.nbytes, lambda space=space: op.decode(space))  # type: ignore[misc]
    yield _Pass("encode", "host", kind, x.nbytes, op.encode_by_host)
    yield _Pass("decode", "host", kind, x.nbytes, op.decode_by_host)


def _kernels(form: Form, op: _Op, kind: str) -> Iterator[_Pass]:
    behind, shape, coding, x = _Behind(), op.shape, op.coding, op.x
    groups = torch.full((shape.groups,), 2.0, device="cuda")
    by = By(groups, groups * 1e30, torch.zeros(shape.rows, dtype=torch.int32, device="cuda"))
    codes = torch.randint(1, 256, (shape.rows, shape.codes), dtype=torch.uint8, device="cuda")
    scales = torch.full((shape.rows,), 1e-2, device="cuda")
    rows = Rows(codes, scales, by.keys, groups, summed=False, failed=False)
    out = torch.empty_like(x)
    bucket = x.nbytes
    yield _Pass("largest", form.name, kind, bucket, lambda: behind(lambda: form.largest(x, shape, coding)))
    yield _Pass(
        "codes", form.name, kind, bucket + codes.numel(), lambda: behind(lambda: form.encode(x, shape, coding, by))
    )
    yield _Pass(
        "averages",
        form.name,
        kind,
        bucket + codes.numel(),
        lambda: behind(lambda: form.decode(rows, shape, coding, out)),
    )


class _Op:
    """One op of a rank: what encode writes and decode reads.

    Args:
        shape: of the bucket.
        x: the bucket.
    """

    def __init__(self, shape: Shape, x: torch.Tensor) -> None:
        self.shape, self.coding, self.x = shape, coding_of(), x
        self._out, self._scratch = torch.empty_like(x), Scratch(WIDTH)
        at = place(shape, OwnerMap(1, tuple(range(RANKS))), RANKS)
        self._scales = scales_of(x.float().cpu().numpy(), shape, self.coding)
        self._packets = packets_of(shape, at)
        ring = np.random.default_rng(1).integers(1, 256, (1 << (shape.rows - 1).bit_length(), WIDTH), dtype=np.uint8)
        scale = np.full(shape.rows, -1e-3, np.float32)
        self._received = Received(ring, self._packets.memory, np.arange(shape.rows, dtype=np.int64), scale)

    def encode(self, space: Workspace) -> Times:
        begin, used = time.perf_counter(), time.thread_time()
        by = DeviceCoder(space, space.stream.mark())
        ready = by.begin(self.x, self.shape, self.coding)
        done, calls = None, time.thread_time() - used
        while done is None:
            while not ready():
                pass
            used = time.thread_time()
            done = by.encode(self.x, self.shape, self.coding, self._packets, self._scales, self._scratch)
            calls += time.thread_time() - used
        assert done.finite
        return 1e3 * (time.perf_counter() - begin), None, 1e3 * calls

    def decode(self, space: Workspace) -> Times:
        begin, used = time.perf_counter(), time.thread_time()
        by = DeviceCoder(space, space.stream.mark())
        by.decode(self._received, self.shape, self.coding, self._out, self._scratch)
        calls = time.thread_time() - used
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin), None, 1e3 * calls

    def encode_by_host(self) -> Times:
        begin, used = time.perf_counter(), time.thread_time()
        x = self.x.float().cpu().numpy()
        assert host.encode(x, self.shape, self.coding, self._packets, self._scales, self._scratch).finite
        return 1e3 * (time.perf_counter() - begin), None, 1e3 * (time.thread_time() - used)

    def decode_by_host(self) -> Times:
        begin, used = time.perf_counter(), time.thread_time()
        found = np.empty(self.shape.numel, np.float32)
        host_decode.decode(self._received, self.shape, self.coding, found, self._scratch)
        self._out.copy_(torch.from_numpy(found))
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin), None, 1e3 * (time.thread_time() - used)
