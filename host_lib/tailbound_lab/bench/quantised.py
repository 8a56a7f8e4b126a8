"""All-to-all and all-gather of our codes of 8 bits over TCP: what our gain in bytes is worth without our transport.

The codec is Tailbound's as it is, rotation, scales and rounding offsets included. Every rank owns an equal share of
the rows; contributions go to their owners and means come back, each by one message of Gloo to each peer. Nothing is
lost and nobody is left out. Rows are wide, so that the 64 bytes before the codes, which carry what our headers say, are
1.5 %.

No ``from __future__ import annotations`` here: DDP inspects the annotations of a hook as objects.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from tailbound.codec.decode import decode, own_source
from tailbound.codec.encode import encode
from tailbound.codec.hashing import fmix, mix, seed_of
from tailbound.codec.mean import mean_rows
from tailbound.codec.owners import OwnerMap, place
from tailbound.codec.records import Coding, Own, Packets, Received, Results, Ring, Scales, Sums
from tailbound.codec.scale import DOWN_MOST, Sum, begin, join, weights_of
from tailbound.codec.scratch import Scratch
from tailbound.codec.shape import shape_for
from tailbound.errors import ConfigError
from tailbound.wire.jit import compiled
from tailbound.wire.packets import DTYPES
from tailbound.wire.schema import HEADER_BYTES

#: Codes of a row; what TCP makes packets of is another matter.
WIDTH = 4096
_NOT_FINITE = "a gradient is not finite, and its quantised average is not defined: train at a lower rate"
_COOKIE = 1
_CONTRIBUTION, _RESULT = 0, 1
#: Before the codes of a contribution, and of a mean.
_ABOUT_CODES = np.dtype([("exponent", "<i2"), ("weight", "u1")])
_ABOUT_MEAN = np.dtype([("scale", "<f4")])
_BYTES, _EIGHT, _LANE = np.uint64(0x00FF00FF00FF00FF), np.uint64(8), np.uint64(0x0001000100010001)
#: Buckets on their way at the same time, each with connections of its own, as Gloo's all-reduces have threads.
_LANES = 2


@compiled
def _sum(rows, exponents, by, lanes, slots, weights, seed):  # type: ignore[no-untyped-def]
    """Adds the codes of rows u64[n, .] to lanes u64[n, .] as the kernel program does, or stores them."""
    head = HEADER_BYTES // 8
    for i in range(rows.shape[0]):
        codes, sums, slot = rows[i, head:], lanes[i], slots[i]
        if slot.count == 0:
            total, added = begin(exponents[i], by[i], weights)
            sums[:] = np.uint64(0)
        else:
            before = Sum(np.int64(slot.exponent), np.int64(slot.units))
            total, added = join(before, exponents[i], by[i], weights, DOWN_MOST, fmix(np.uint32(seed + np.uint32(i))))
        if added.move:
            move, kept = np.uint64(added.move), np.uint64(0xFFFF >> added.move) * _LANE
            for j in range(sums.shape[0]):
                sums[j] = sums[j] >> move & kept
        weight, down, kept = np.uint64(added.weight), np.uint64(added.down), np.uint64(0xFFFF >> added.down) * _LANE
        more = np.uint64(added.add) * _LANE
        for j in range(codes.shape[0]):
            sums[2 * j] += (codes[j] & _BYTES) * weight + more >> down & kept
            sums[2 * j + 1] += (codes[j] >> _EIGHT & _BYTES) * weight + more >> down & kept
        slot.exponent, slot.units = total.exponent, total.units
        slot.count += 1


def _wait(works: Iterable[dist.Work | None]) -> None:
    for work in works:
        assert work is not None
        work.wait()


class Quantised:
    """Means of float32 buffers of ``numel`` entries, of one rank of ``group``."""

    def __init__(self, numel: int, group: dist.ProcessGroup) -> None:
        self._group, self._rank, self._ranks = group, group.rank(), group.size()
        self._shape = shape = shape_for(numel, WIDTH)
        self._at = place(shape, OwnerMap(1, tuple(range(self._ranks))), self._ranks)
        self._scratch = Scratch(WIDTH)
        self._op = 0
        groups, stride = shape.groups, HEADER_BYTES + shape.codes
        self._packets = np.zeros((shape.rows, stride), np.uint8)
        self._results = np.zeros((shape.rows, stride), np.uint8)
        self._mine = self._at.positions_of(self._rank)
        own = int(self._at.counts[self._rank])
        self._arrived = np.zeros((self._ranks, own, stride), np.uint8)
        ring = 1 << max(0, own - 1).bit_length()
        self._lanes = np.zeros((ring, 2 * shape.codes), np.uint8)
        self._slots = np.zeros(ring, DTYPES["tb_slot"])
        self._partials = np.zeros((shape.rows, 4), np.uint64)
        self._scales = Scales(np.zeros(groups, np.int16), np.zeros(groups, np.int16), np.zeros(groups, np.uint8))
        self._group_at = shape.layout.of[self._at.row_at]
        self._peers = [(self._rank + i) % self._ranks for i in range(1, self._ranks)]
        self._source = np.array([own_source(int(p)) for p in self._at.position], np.int64)

    def mean(self, buffer: torch.Tensor) -> None:
        """``buffer``, f32[numel], becomes the mean of all ranks'.

        Raises:
            ConfigError: a value is not finite, or beyond 2^120.
        """
        x = buffer.numpy()
        coding = Coding(seed_of(_COOKIE, self._op), weights_of(self._ranks))
        arriving = [
            dist.irecv(torch.from_numpy(self._arrived[peer]), group=self._group, group_src=peer, tag=_CONTRIBUTION)
            for peer in self._peers
        ]
        returning = [
            dist.irecv(self._rows(self._results, peer), group=self._group, group_src=peer, tag=_RESULT)
            for peer in self._peers
        ]
        packets = Packets(self._packets, self._at.position, self._partials)
        if not encode(x, self._shape, coding, packets, self._scales, self._scratch).finite:
            raise ConfigError(_NOT_FINITE)
        about = self._packets[:, : _ABOUT_CODES.itemsize].view(_ABOUT_CODES)[:, 0]
        about["exponent"] = self._scales.exponents[self._group_at]
        about["weight"] = self._scales.weights[self._group_at]
        sent = [
            dist.isend(self._rows(self._packets, peer), group=self._group, group_dst=peer, tag=_CONTRIBUTION)
            for peer in self._peers
        ]
        self._average(coding, arriving)
        sent += [
            dist.isend(self._rows(self._results, self._rank), group=self._group, group_dst=peer, tag=_RESULT)
            for peer in self._peers
        ]
        _wait(returning)
        known = self._results[:, : _ABOUT_MEAN.itemsize].copy().view(_ABOUT_MEAN)[:, 0]
        position = self._at.position
        none = np.zeros((1, self._shape.codes), np.uint8)
        received = Received(none, self._results, self._source, known["scale"][position].astype(np.float32))
        decode(received, self._shape, coding, x, self._scratch)
        _wait(sent)
        self._op += 1

    def _rows(self, memory: NDArray[np.uint8], owner: int) -> torch.Tensor:
        return torch.from_numpy(memory[self._at.positions_of(owner)])

    def _average(self, coding: Coding, arriving: list[dist.Work | None]) -> None:
        """Sums what comes, and writes the means of the own rows into ``_results``."""
        count = int(self._at.counts[self._rank])
        slots = self._slots[:count]
        slots["cookie"], slots["op"], slots["count"] = _COOKIE, self._op, 0
        lanes, weights = self._lanes.view(np.uint64), weights_of(self._ranks)
        for peer, work in zip(self._peers, arriving, strict=True):
            _wait([work])
            rows = self._arrived[peer]
            about = rows[:, : _ABOUT_CODES.itemsize].copy().view(_ABOUT_CODES)[:, 0]
            seed = np.uint32(mix(self._op * self._ranks + peer))
            _sum(rows.view(np.uint64), about["exponent"].copy(), about["weight"].copy(), lanes, slots, weights, seed)
        memory = self._results[self._mine]
        out = Results(
            memory, np.zeros((count, 4), np.uint64), np.zeros(count, np.float32), np.zeros(count, np.uint16),
            np.zeros(count, np.uint8),
        )  # fmt: skip
        sums = Sums(Ring(self._lanes, self._slots), 0, _COOKIE, self._op)
        own = Own(self._at.rows_of(self._rank), self._packets[self._mine], True, self._scales)
        mean_rows(sums, own, self._shape, coding, out, self._scratch)
        memory[:, : _ABOUT_MEAN.itemsize].view(_ABOUT_MEAN)[:, 0]["scale"] = out.scale


def register_quantised(model: DistributedDataParallel) -> None:
    """Let ``Quantised`` average the float32 gradients of ``model``, of the default group, beside the backward pass."""
    lanes = []
    for _ in range(_LANES):
        group = dist.new_group()
        assert group is not None
        lanes.append((group, ThreadPoolExecutor(1, thread_name_prefix="quantised")))
    made: dict[tuple[int, int], Quantised] = {}

    def hook(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        index, buffer = bucket.index(), bucket.buffer()  # DDP hands over buckets in the same order on all ranks
        group, thread = lanes[index % _LANES]
        key = index, buffer.numel()
        if key not in made:
            made[key] = Quantised(buffer.numel(), group)
        average = made[key].mean
        devices: list[int | str | torch.device] | None = [buffer.device] if buffer.is_cuda else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        host = buffer.cpu()  # the buffer itself, if it is there; else on the stream of this thread

        def work() -> None:
            try:
                average(host)
                if host is not buffer:
                    buffer.copy_(host)
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(buffer)

        thread.submit(work)
        return future

    model.register_comm_hook(None, hook)
