"""Buckets on a device: coded and decoded there, so that codes cross to the host, and some bytes a row and group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from tailbound.codec import staging
from tailbound.codec.decode import MISSING
from tailbound.codec.encode import Encoded
from tailbound.codec.feedback import mark_own
from tailbound.codec.hashing import STAGE_CONTRIBUTION, STAGE_RESULT
from tailbound.codec.plan import Factors, plan
from tailbound.codec.records import Coding, Packets, Received, Scales
from tailbound.codec.shape import GROUP_ROWS, Shape, shape_for
from tailbound.errors import ConfigError
from tailbound.wire.schema import HEADER_BYTES, ROW_STEP, WIDTH_STEP

DevicePath: TypeAlias = Any  # of ``paths``, which imports this module


class By(NamedTuple):
    """What codes are made by, on the device: ``codec.plan.Factors``, keys as i32[T]."""

    factors: torch.Tensor
    limits: torch.Tensor
    keys: torch.Tensor


class Largest(NamedTuple):
    """What decides how groups are coded: bits of their largest values, i32[G], and for codes of 4 bits the sums of
    squares before rotation, f64[G].
    """

    bits: torch.Tensor
    squares: torch.Tensor | None = None


class Rows(NamedTuple):
    """What averages are made of, on the device: ``codec.staging.Unpacked``."""

    codes: torch.Tensor  #: u8[T, bytes of a row], twice as many if ``summed``
    factors: torch.Tensor
    offsets: torch.Tensor  #: i32[T], ``keys``, or ``zeros`` if ``summed``
    group_factors: torch.Tensor
    summed: bool
    failed: bool  #: whether there are groups of which nothing was received
    stage: int = STAGE_RESULT  #: whose rounding offsets the codes have


class Form(Protocol):
    """How a device codes: kernels of Triton, and in tests what stands in for them, with the same bits.

    A form keeps nothing and waits for nothing. What it returns is queued on the current stream.
    """

    #: as ``stats()`` says it
    name: str

    def largest(self, x: torch.Tensor, shape: Shape, coding: Coding) -> Largest:
        """Of each group of ``x`` (any float type, [numel]) once rotated."""

    def encode(self, x: torch.Tensor, shape: Shape, coding: Coding, by: By) -> tuple[torch.Tensor, torch.Tensor]:
        """Bytes of codes of ``x``, u8[T, bytes of a row], and how many rotated values are beyond limits, i64[1]."""

    def decode(self, rows: Rows, shape: Shape, coding: Coding, out: torch.Tensor) -> None:
        """What ``rows``, of ``shape``, say to ``out`` (any float type, [numel])."""


@dataclass
class _Coding:
    """One op on its way: what ``Form`` has made of it, on the host once the event ``done`` is over."""

    done: Any
    found: Largest
    codes: torch.Tensor | None = None
    beyond: torch.Tensor | None = None

    def ready(self) -> bool:
        """Whether the device has done it."""
        return bool(self.done.query())


class DeviceCoder:
    """``collective.coder.Coder`` for tensors on a device, contiguous, of any float type, coded there.

    Nothing here waits for the device. ``mark``: where the bucket is ready (``Stream.mark``).
    """

    ahead = True

    def __init__(self, path: DevicePath, mark: Any) -> None:
        self._path, self._mark = path, mark
        self._ops: dict[int, _Coding] = {}  # by their seeds

    def warm_up(self, x: torch.Tensor, out: torch.Tensor, shape: Shape, coding: Coding) -> None:
        """Codes a few zeros in the same way, once for each kind of op: so all that is compiled is compiled here.

        Raises:
            ConfigError: Triton cannot (it needs a C compiler, say).
        """
        path, kind = self._path, (x.dtype, out.dtype, shape.bits, coding.rotate)
        fresh = [size for size in shape.sizes if (*kind, size) not in path.warm]
        if not fresh:
            return
        try:
            self._rehearse(x, out, fresh, shape.bits, coding)
        except Exception as error:
            raise ConfigError(
                f"Triton's kernels fail on {x.device}: {error}. Give Triton what it needs (a C compiler, say)"
            ) from error
        path.warm.update((*kind, size) for size in fresh)

    def _rehearse(self, x: torch.Tensor, out: torch.Tensor, sizes: list[int], bits: int, coding: Coding) -> None:
        """Codes an op that has one group of each of ``sizes``."""
        path, device = self._path, x.device
        runs = tuple(size * ROW_STEP * 8 // bits for size in sizes)
        small = Shape(sum(runs), WIDTH_STEP, GROUP_ROWS, ROW_STEP, bits, runs)
        with path.stream.use():
            zeros = torch.zeros(small.numel, dtype=x.dtype, device=device)
            by_group = torch.zeros(small.groups, device=device)
            by_row, keys = (torch.zeros(small.rows, dtype=d, device=device) for d in (torch.float32, torch.int32))
            path.form.largest(zeros, small, coding)
            path.form.encode(zeros, small, coding, By(by_group, by_group, keys))
            told = {(small.results, out.dtype)}
            if x.dtype == torch.float32:  # it may have error feedback, which asks what contributions say
                told.add((small, torch.float32))
            for each, dtype in told:
                codes = torch.zeros((small.rows, each.codes), dtype=torch.uint8, device=device)
                given = Rows(codes, by_row, keys, by_group, summed=False, failed=False)
                path.form.decode(given, each, coding, zeros.to(dtype))

    def prepare(self, x: torch.Tensor, shape: Shape, coding: Coding) -> Callable[[], bool]:
        """Queues the largest values of the groups, which decide how they are coded."""
        stream = self._path.stream
        with stream.use(self._mark):
            bits, squares = self._path.form.largest(x, shape, coding)
            found = Largest(self._fetch(bits), None if squares is None else self._fetch(squares))
            op = self._ops[coding.seed] = _Coding(stream.event(), found)
        return op.ready

    def measure(self, x: torch.Tensor, shape: Shape, coding: Coding, need: NDArray[np.int16], _: Any) -> bool:
        """As ``codec.encode.measure``, once it is ``ready``."""
        scales = Scales(np.zeros(shape.groups, np.int16), need, np.empty(shape.groups, np.uint8))
        factors, limits = np.empty((2, shape.groups), np.float32)
        by = Factors(factors, limits, np.empty(shape.rows, np.uint32))
        return plan(*_words(self._begun(coding).found, shape, coding, scales, by)).finite

    def encode(
        self, x: torch.Tensor, shape: Shape, coding: Coding, packets: Packets, scales: Scales, _: Any
    ) -> Encoded | None:
        """As ``codec.encode.encode``, once it is ``ready``; None: not yet, codes are being made."""
        op = self._begun(coding)
        if op.codes is None:
            if not self._code(op, x, shape, coding, scales):
                del self._ops[coding.seed]
                return Encoded(False, 0)
            if not op.ready():
                return None
        assert op.codes is not None
        assert op.beyond is not None
        staging.pack(op.codes.numpy(), shape, packets, coding.key)
        del self._ops[coding.seed]
        return Encoded(True, int(op.beyond))

    def decode(self, received: Received, shape: Shape, coding: Coding, out: torch.Tensor, _: Any) -> int:
        """As ``codec.decode.decode``, but ``out`` is there only when the stream is."""
        return self._decode(received, shape.results, coding, out, STAGE_RESULT)

    def write_residual(
        self, data: torch.Tensor, own: Received, scales: Scales, shape: Shape, coding: Coding, residual: torch.Tensor,
        _: Any,
    ) -> None:  # fmt: skip
        """As ``codec.feedback.write_residual``, by the own codes, which go back; ``residual`` comes with the stream."""
        mark_own(own, scales, shape, coding)
        self._decode(own, shape, coding, residual, STAGE_CONTRIBUTION)
        with self._path.stream.use(self._mark):
            torch.sub(data, residual, out=residual)

    def clear(self, average: torch.Tensor) -> None:
        """Makes the average zero."""
        with self._path.stream.use(self._mark):
            average.zero_()

    def keep(self, x: torch.Tensor, average: torch.Tensor) -> None:
        """Makes the own values the average."""
        with self._path.stream.use(self._mark):
            average.copy_(x)

    def _begun(self, coding: Coding) -> _Coding:
        op = self._ops.get(coding.seed)
        if op is None or not op.ready():
            raise RuntimeError("codes are asked for before a device is through: call begin(), and ask what it returns")
        return op

    def _code(self, op: _Coding, x: torch.Tensor, shape: Shape, coding: Coding, scales: Scales) -> bool:
        """Settles on the host how groups are coded, and has the device do so; False: not all is finite."""
        stream = self._path.stream
        with stream.use(self._mark):
            factors, limits = (stream.host_memory(shape.groups, dtype=torch.float32) for _ in range(2))
            keys = stream.host_memory(shape.rows, dtype=torch.int32)
            by = Factors(factors.numpy(), limits.numpy(), keys.numpy().view(np.uint32))
            finite = plan(*_words(op.found, shape, coding, scales, by)).finite
            if finite:
                there = By(*(part.to(x.device, non_blocking=True) for part in (factors, limits, keys)))
                op.codes, op.beyond = map(self._fetch, self._path.form.encode(x, shape, coding, there))
                op.done = stream.event()
        return finite

    def _fetch(self, part: torch.Tensor) -> torch.Tensor:
        """Has the device copy ``part`` to the host."""
        there: torch.Tensor = self._path.stream.host_memory(*part.shape, dtype=part.dtype)
        return there.copy_(part, non_blocking=True)

    def _decode(self, received: Received, shape: Shape, coding: Coding, out: torch.Tensor, stage: int) -> int:
        stream, device = self._path.stream, out.device
        summed = len(received.counts) > 0
        width = shape.codes * (2 if summed else 1)
        with stream.use(self._mark):
            codes = stream.host_memory(shape.rows, width, dtype=torch.uint8)
            factors = stream.host_memory(shape.rows, dtype=torch.float32)
            zeros, keys = (stream.host_memory(shape.rows, dtype=torch.int32) for _ in range(2))
            group_factors = stream.host_memory(shape.groups, dtype=torch.float32)
            of_each = codes.numpy(), factors.numpy(), zeros.numpy(), keys.numpy(), group_factors.numpy()
            failed = staging.unpack(received, shape, coding, staging.Unpacked(*of_each), stage)
            given = codes, factors, zeros if summed else keys, group_factors
            there, by_row, offsets, by_group = (part.to(device, non_blocking=True) for part in given)
            rows = Rows(there, by_row, offsets, by_group, summed, failed > 0, stage)
            self._path.form.decode(rows, shape, coding, out)
        return failed


def _words(found: Largest, shape: Shape, coding: Coding, scales: Scales, by: Factors) -> tuple[Any, ...]:
    """Arguments of ``plan``."""
    given: tuple[Any, ...] = found.bits.numpy().view(np.uint32), shape, coding, scales, by
    return given if found.squares is None else (*given, found.squares.numpy())


def warm_up() -> None:
    """Compiles, or loads from the cache, what packs and unpacks, before the first packet is due."""
    shape = shape_for(WIDTH_STEP, WIDTH_STEP)
    packets = np.zeros((shape.rows, HEADER_BYTES + shape.codes), np.uint8)
    codes = np.zeros((shape.rows, shape.codes), np.uint8)
    position = np.arange(shape.rows, dtype=np.int32)
    partials = np.zeros((shape.rows, 4), np.uint64)
    staging.pack(codes, shape, Packets(packets, position, partials))
    exponents, factors = np.zeros(shape.groups, np.int16), np.zeros(shape.groups, np.float32)
    scales = Scales(exponents, exponents.copy(), np.zeros(shape.groups, np.uint8))
    by = Factors(factors, factors.copy(), np.zeros(shape.rows, np.uint32))
    plan(np.zeros(shape.groups, np.uint32), shape, Coding(0), scales, by)
    of_rows = np.zeros(shape.rows, np.float32)
    received = Received(codes, packets, np.full(shape.rows, MISSING), of_rows)
    of_each = np.zeros(shape.rows, np.int32)
    out = staging.Unpacked(codes.copy(), of_rows.copy(), of_each, of_each.copy(), factors)
    staging.unpack(received, shape, Coding(0), out)
