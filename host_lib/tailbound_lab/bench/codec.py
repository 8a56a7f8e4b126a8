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
from tailbound.codec.mean import mean_rows
from tailbound.codec.records import Own, Received, Ring, Sums, results
from tailbound.wire.bits import Bits, bits_text
from tailbound.wire.packets import DTYPES
from tailbound_lab.bench.gradients import LAYERS, SIZES, draw, exact_mean, worst_tensor
from tailbound_lab.bench.local_job import LocalJob, nmse
from tailbound_lab.bench.table import save

RANKS, WIDTH, OP = 4, 1408, 1
#: Passes that an op takes of a rank.
_OP = ("encode", "mean", "decode")
#: Name -> (bytes of float32, call).
Passes = dict[str, tuple[int, Callable[[], Any]]]


class _Case(NamedTuple):
    """What an error is told of."""

    rotate: bool = True
    loss: float = 0.0
    bits: Bits = 8
    ranks: int = RANKS
    correlation: float = 0.0

    @property
    def name(self) -> str:
        usual = (self.bits, self.ranks, self.correlation) == (8, RANKS, 0.0)
        how = "" if usual else f"{bits_text(self.bits)} bits, {self.ranks} ranks, correlation {self.correlation:g}, "
        rotation = "rotated" if self.rotate else "plain"
        return f"{rotation}, {how}{self.loss:.0%} of results lost"


_CASES = (
    *(_Case(True, loss) for loss in (0.0, 0.01)),
    *(_Case(bits=b, ranks=n, correlation=c) for b in (8, (4, 8)) for n, c in ((4, 0.5), (16, 0.0), (16, 0.5))),
    _Case(bits=(4, 8)),
    *(_Case(False, loss) for loss in (0.0, 0.01)),
)


def run(json_path: Path | None = None, *, quick: bool = False, megabytes: float = 26.2144) -> list[dict[str, Any]]:
    """Measures every pass over one float32 bucket by one thread.

    Args:
        json_path: where the rows go, with those of ``errors`` after them.
        quick: fewer repeats, no error rows.
        megabytes: size of the bucket, 10**6 bytes.

    Returns:
        Rows ``name, bytes, ms, cpu_ms, gbps``: bytes of float32 that the pass stands for, time and processor time, GB
        (10**9 bytes) a second. ``op`` is encode, mean and decode.
    """
    numel = int(megabytes * 1e6) // 4
    passes = _passes(numel)
    times = _in_turn(passes, 5 if quick else 21)
    times["op"] = np.sum([times[name] for name in _OP], axis=0)
    sizes = {name: size for name, (size, _) in passes.items()} | {"op": 4 * numel}
    rows = []
    for name, each in times.items():
        seconds, cpu = np.median(each, axis=0).tolist()
        speed = {"ms": seconds * 1e3, "cpu_ms": cpu * 1e3, "gbps": sizes[name] / seconds / 1e9}
        rows.append({"name": name, "bytes": sizes[name]} | speed)
    save(rows + ([] if quick else errors()), json_path)
    return rows


def _in_turn(passes: Passes, rounds: int) -> dict[str, NDArray[np.float64]]:
    """Name -> seconds and processor time of every pass, f64[rounds, 2]."""
    times = {name: np.zeros((rounds, 2)) for name in passes}
    for _, call in passes.values():
        call()
    for turn in range(rounds):
        for name, (_, call) in passes.items():
            start, used = time.perf_counter(), time.process_time()
            call()
            times[name][turn] = time.perf_counter() - start, time.process_time() - used
    return times


def _passes(numel: int) -> Passes:
    """Every pass, for the first of four ranks."""
    job, rng = LocalJob(RANKS, numel, WIDTH), np.random.default_rng(0)
    shape, at, scratch, codes = job.shape, job.placement, job.scratch, job.shape.codes
    own = int(at.counts[0])
    x = rng.standard_normal(numel, np.float32)
    copy, decoded = np.empty_like(x), np.empty_like(x)
    coding, packets, scales = job.coding(OP), job.packets_of(0), job.scales[0]
    encode(x, shape, coding, packets, scales, scratch)
    need = np.zeros(shape.groups, np.int16)
    # sums of three peers, in a ring twice as long as needed
    ring = 2 << (own - 1).bit_length()
    sums, slots = np.zeros((ring, 2 * WIDTH), np.uint8), np.zeros(ring, DTYPES["tb_slot"])
    weight = 3 * int(scales.weights[0]) << job.weights.spare
    sums.view(np.uint16)[:] = rng.integers(weight, weight * 255, (ring, WIDTH))
    slots["cookie"], slots["op"], slots["count"], slots["units"] = job.cookie, OP, 3, 128 * weight
    slots["ranks"][:, 0] = 0b1110
    slots["exponent"][:own] = scales.exponents[shape.layout.of[at.rows_of(0)]] - 4 * job.weights.spare
    sealed, made = Sums(Ring(sums, slots), 0, job.cookie, OP), results(own, codes)
    contributed = Own(at.rows_of(0), packets.memory[:own], True, scales)
    result_ring = rng.integers(1, 256, (1 << (shape.rows - 1).bit_length(), WIDTH), dtype=np.uint8)
    source = np.arange(shape.rows, dtype=np.int64)
    source[at.rows_of(0)] = [own_source(i) for i in range(own)]
    received = Received(result_ring, made.packets, source, -np.ones(shape.rows, np.float32))
    return {
        "encode": (4 * numel, lambda: encode(x, shape, coding, packets, scales, scratch)),
        "measure": (4 * numel, lambda: measure(x, shape, coding, need, scratch)),
        "mean": (4 * own * codes, lambda: mean_rows(sealed, contributed, shape, coding, made, scratch)),
        "decode": (4 * numel, lambda: decode(received, shape, coding, decoded, scratch)),
        "memcpy": (4 * numel, lambda: np.copyto(copy, x)),
    }


def errors() -> list[dict[str, Any]]:
    """What the ranks get for layers of unequal scale, by bits, ranks, correlation, and results lost.

    Rotation spreads a loss over all entries of a group, and so from large tensors into small ones beside them: the
    error of the worst tensor says how much (codec-16).

    Returns:
        Rows ``name, bits, ranks, correlation, bytes, ms, gbps, nmse, worst_tensor, worst_nmse``;
        ``ms`` for all ranks.
    """
    rows = []
    for case in _CASES:
        rng = np.random.default_rng(7)
        gradients = draw(LAYERS, case.ranks, case.correlation, rng)
        job = LocalJob(case.ranks, gradients[0].size, WIDTH, rotate=case.rotate, bits=case.bits, tensors=SIZES)
        lost = rng.random((case.ranks, job.shape.rows)) < case.loss
        start = time.perf_counter()
        value = job.step(OP, gradients, lost_results=lost, receivers=[0]).outputs[0]
        seconds, nbytes = time.perf_counter() - start, gradients[0].nbytes
        worst, error = worst_tensor(value, exact_mean(gradients))
        rows.append(
            {
                "name": case.name, "bits": bits_text(case.bits), "ranks": case.ranks, "correlation": case.correlation,
                "bytes": nbytes, "ms": seconds * 1e3, "gbps": nbytes / seconds / 1e9,
                "nmse": nmse(value, gradients), "worst_tensor": worst, "worst_nmse": error,
            }
        )  # fmt: skip
    return rows
