"""``tailbound bench codec``: what encoding, averaging and decoding cost, and what error they leave.

Times are medians of interleaved repeats: every pass runs once a round, so that all see the same state of the machine.
``memcpy`` is the yardstick: a copy of the same bucket.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.decode import decode, own_source
from tailbound.codec.encode import encode, measure
from tailbound.codec.hashing import seed_of
from tailbound.codec.local import LocalJob, nmse
from tailbound.codec.mean import mean_by
from tailbound.codec.owners import OwnerMap, Placement, place
from tailbound.codec.records import Coding, Own, Packets, Received, Scales, Sums, results
from tailbound.codec.scale import cold_exponents, headroom_of, shift_cap_of
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import Shape, shape_for
from tailbound.codec.threads import Threads
from tailbound.errors import ConfigError
from tailbound.wire.bits import Bits, bits_text, bits_told
from tailbound.wire.packets import DTYPES
from tailbound.wire.schema import HEADER_BYTES, key_bytes
from tailbound.wire.tag import key_of
from tailbound_lab.bench.gradients import LAYERS, balance, draw, exact_mean, worst_tensor
from tailbound_lab.bench.table import save

RANKS, WIDTH, OP, COOKIE = 4, 1408, 1, 1
#: Passes that an op takes of a rank.
_OP = ("encode", "mean", "decode")
#: Encoding in a job with a key.
_KEYED = "encode, keyed"
#: Name -> (bytes of float32, call by threads).
Passes = dict[str, tuple[int, Callable[[Threads], Any]]]


class _Case(NamedTuple):
    """What an error is told of."""

    rotate: bool = True
    loss: float = 0.0
    bits: Bits = 8
    ranks: int = RANKS
    correlation: float = 0.0
    balance: bool = False

    @property
    def name(self) -> str:
        usual = (self.bits, self.ranks, self.correlation) == (8, RANKS, 0.0)
        how = "" if usual else f"{bits_text(self.bits)} bits, {self.ranks} ranks, correlation {self.correlation:g}, "
        rotation = ("balanced" if self.balance else "rotated") if self.rotate else "plain"
        return f"{rotation}, {how}{self.loss:.0%} of results lost"


_ROTATED = (
    *(_Case(True, loss) for loss in (0.0, 0.01)),
    *(_Case(bits=b, ranks=n, correlation=c) for b in (8, (4, 8)) for n, c in ((4, 0.5), (16, 0.0), (16, 0.5))),
    _Case(bits=(4, 8)),
)
_CASES = (*_ROTATED, *(each._replace(balance=True) for each in _ROTATED), *(_Case(False, loss) for loss in (0.0, 0.01)))


def run(
    json_path: Path | None = None, threads: int = 1, *, quick: bool = False, megabytes: float = 26.2144
) -> list[dict[str, Any]]:
    """Measures every pass over one float32 bucket, by one thread and, in turn with it, by ``threads``.

    Args:
        json_path: where the rows go, with those of ``errors`` after them.
        threads: threads that share an op as they do in a job (``codec_threads``).
        quick: fewer repeats, no error rows.
        megabytes: size of the bucket, 10**6 bytes.

    Returns:
        Rows ``name, bytes, threads, ms, cpu_ms, gbps, speedup``: bytes of float32 that the pass stands for, processor
        time of all threads, GB (10**9 bytes) a second, the time of one thread over this one (median of the rounds;
        1 for one thread). ``op`` is encode, mean and decode; ``encode, keyed`` is encode with a tag in the place of the
        check, and has ``over_plain``, its processor time over that of encode by as many threads (median of the rounds).

    Raises:
        ConfigError: ``threads`` or ``megabytes`` below 1 (entry).
    """
    numel = int(megabytes * 1e6) // 4
    if threads < 1 or numel < 1:
        raise ConfigError(f"{threads} threads and {megabytes} MB: give numbers above 0")
    crews = [Threads(count, WIDTH) for count in dict.fromkeys((1, threads))]
    try:
        passes = _passes(numel)
        times = _in_turn(passes, crews, 5 if quick else 21)
    finally:
        for crew in crews:
            crew.close()
    times["op"] = np.sum([times[name] for name in _OP], axis=0)
    over_plain = np.median(times[_KEYED][..., 1] / times["encode"][..., 1], axis=0)
    sizes = {name: size for name, (size, _) in passes.items()} | {"op": 4 * numel}
    rows = []
    for name, each in times.items():
        for i, crew in enumerate(crews):
            seconds, cpu = np.median(each[:, i], axis=0).tolist()
            rows.append(
                {
                    "name": name, "bytes": sizes[name], "threads": len(crew), "ms": seconds * 1e3, "cpu_ms": cpu * 1e3,
                    "gbps": sizes[name] / seconds / 1e9, "speedup": float(np.median(each[:, 0, 0] / each[:, i, 0])),
                    "over_plain": float(over_plain[i]) if name == _KEYED else None,
                }
            )  # fmt: skip
    save(rows + ([] if quick else errors()), json_path)
    return rows


def _in_turn(passes: Passes, crews: list[Threads], rounds: int) -> dict[str, NDArray[np.float64]]:
    """Name -> seconds and processor time of every pass, f64[rounds, crews, 2]; the crews take turns, first and last."""
    times = {name: np.zeros((rounds, len(crews), 2)) for name in passes}
    for _, call in passes.values():
        for crew in crews:
            call(crew)
    for turn in range(rounds):
        for name, (_, call) in passes.items():
            for i in range(len(crews))[:: -1 if turn % 2 else 1]:
                start, used = time.perf_counter(), time.process_time()
                call(crews[i])
                times[name][turn, i] = time.perf_counter() - start, time.process_time() - used
    return times


def coding_of() -> Coding:
    """Of the first of ``RANKS`` ranks in op ``OP``."""
    return Coding(seed_of(COOKIE, OP), 0, shift_cap_of(RANKS), headroom_of(RANKS), ranks=RANKS)


def scales_of(x: NDArray[np.float32], shape: Shape, coding: Coding) -> Scales:
    """Of a cold op of ``x`` alone."""
    need, shift = np.zeros(shape.groups, np.int16), np.zeros(shape.groups, np.uint8)
    measure(x, shape, coding, need, Scratch(WIDTH))
    return Scales(cold_exponents(need[None], coding.headroom), need, shift)


def packets_of(shape: Shape, at: Placement) -> Packets:
    """Memory of a rank's contributions, zeros."""
    memory = np.zeros((shape.rows, HEADER_BYTES + shape.codes), np.uint8)
    return Packets(memory, at.position, np.zeros((shape.rows, 4), np.uint64))


def _passes(numel: int) -> Passes:
    """Every pass, for the first of four ranks."""
    shape = shape_for(numel, WIDTH)
    at = place(shape, OwnerMap(1, tuple(range(RANKS))), RANKS)
    codes, rng = shape.codes, np.random.default_rng(0)
    own, groups = int(at.counts[0]), at.rows_of(0) // shape.group_rows
    x = rng.standard_normal(numel, np.float32)
    copy = np.empty_like(x)
    coding = coding_of()
    keyed = coding._replace(key=key_of(rng.bytes(key_bytes(WIDTH) - 8), 0))
    work = np.zeros(shape.groups, np.int16)
    scales = scales_of(x, shape, coding)
    exponents, need = scales.exponents, scales.need
    packets = packets_of(shape, at)
    memory = packets.memory
    # sums of three peers, in a ring twice as long as needed
    ring = 2 << (own - 1).bit_length()
    sums, slots = np.zeros((ring, 2 * WIDTH), np.uint8), np.zeros(ring, DTYPES["tb_slot"])
    sums.view(np.uint16)[:] = rng.integers(3, 3 * 255, (ring, WIDTH))
    slots["cookie"], slots["op"], slots["count"], slots["units"] = COOKIE, OP, 3, 3
    slots["ranks"][:, 0] = 0b1110
    slots["exponent"][:own] = exponents[groups]
    sealed, made = Sums(sums, slots, 0, COOKIE, OP, exponents), results(own, codes)
    contributed = Own(at.rows_of(0), memory[:own], True, scales, work)
    result_ring = rng.integers(1, 256, (1 << (shape.rows - 1).bit_length(), WIDTH), dtype=np.uint8)
    source = np.arange(shape.rows, dtype=np.int64)
    source[at.rows_of(0)] = [own_source(i) for i in range(own)]
    received = Received(result_ring, made.packets, source, -np.ones(shape.rows, np.float32))
    decoded = np.empty_like(x)

    def shared(total: int, work: Callable[[Scratch, tuple[int, int]], Any]) -> Callable[[Threads], Any]:
        return lambda threads: threads.each(total, work)

    def copy_part(_: Scratch, part: tuple[int, int]) -> None:
        np.copyto(copy[slice(*part)], x[slice(*part)])

    return {
        "encode": (
            4 * numel,
            shared(shape.groups, lambda s, part: encode(x, shape, coding, packets, scales, s, groups=part)),
        ),
        _KEYED: (
            4 * numel,
            shared(shape.groups, lambda s, part: encode(x, shape, keyed, packets, scales, s, groups=part)),
        ),
        "measure": (4 * numel, shared(shape.groups, lambda s, part: measure(x, shape, coding, need, s, groups=part))),
        "mean": (4 * own * codes, lambda threads: mean_by(threads, sealed, contributed, shape, coding, made)),
        "decode": (
            4 * numel,
            shared(shape.groups, lambda s, part: decode(received, shape, coding, decoded, s, groups=part)),
        ),
        "memcpy": (4 * numel, shared(numel, copy_part)),
    }


def errors() -> list[dict[str, Any]]:
    """What the ranks get for layers of unequal scale, by bits, ranks, correlation, and results lost.

    Rotation spreads a loss over all entries of a group, and so from large tensors into small ones beside them: the
    error of the worst tensor says how much (codec-16).

    Returns:
        Rows ``name, bits, ranks, correlation, balance, bytes, threads, ms, gbps, nmse, worst_tensor,
        worst_tensor_nmse``; ``ms`` for all ranks.
    """
    rows = []
    for case in _CASES:
        rng = np.random.default_rng(7)
        gradients = draw(LAYERS, case.ranks, case.correlation, rng)
        job = LocalJob(case.ranks, gradients[0].size, WIDTH, rotate=case.rotate, bits=case.bits)
        if case.balance:
            balance(job, gradients, LAYERS)
        lost = rng.random((case.ranks, job.shape.rows)) < case.loss
        start = time.perf_counter()
        value = job.step(OP, gradients, lost_results=lost, receivers=[0]).outputs[0]
        seconds, nbytes = time.perf_counter() - start, gradients[0].nbytes
        worst, error = worst_tensor(value, exact_mean(gradients))
        rows.append(
            {
                "name": case.name,
                "bits": bits_told(case.bits),
                "ranks": case.ranks,
                "correlation": case.correlation,
                "balance": case.balance,
                "bytes": nbytes,
                "threads": 1,
                "ms": seconds * 1e3,
                "gbps": nbytes / seconds / 1e9,
                "nmse": nmse(value, gradients),
                "worst_tensor": worst,
                "worst_tensor_nmse": error,
            }
        )
    return rows
