"""Buckets among the ranks of a host: reduce-scatter before the exchange between hosts, all-gather after it.

A bucket of n entries is cut into as many shards as the host has ranks. The rank at place k gets the mean over the host
of shard k, has it averaged with those of its peers on other hosts, and hands what comes to all ranks of the host. All
shards of a bucket are of one size, a multiple of ``ALIGN`` entries; what lies behind the bucket's end is zero.

Every rank calls the collectives of a group in the order of buckets, whatever comes first: Gloo pairs the calls of a
group by their number.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

#: Shards begin at multiples of so many entries: a cache line and vectors of the codec, in every type.
ALIGN = 16

#: Newer PyTorch has another name for it.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_thread = threading.local()


def cut(numel: int, places: int) -> tuple[int, list[int]]:
    """Entries of a shard, and how many of each of ``places`` shards are the bucket's."""
    size = -(-numel // (places * ALIGN)) * ALIGN
    return size, [min(max(numel - place * size, 0), size) for place in range(places)]


@dataclass
class Room:
    """Memory of one bucket.

    Attributes:
        sizes: how many entries of each shard are the bucket's.
        parts: this rank's shard as each rank of the host has it, [places * sizes[place]].
        shard: their mean, and zeros behind the bucket's end.
        whole: the averages of all shards.
    """

    sizes: list[int]
    parts: torch.Tensor
    shard: torch.Tensor
    whole: torch.Tensor


class InOrder:
    """Does what becomes ready, by whatever thread, in the order of numbers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: dict[int, Callable[[], None]] = {}
        self._next = 0

    def ready(self, number: int, action: Callable[[], None]) -> None:
        """``action``, which raises nothing, is number ``number`` of 0, 1, 2, ...; each comes once."""
        with self._lock:
            self._ready[number] = action
            while (due := self._ready.pop(self._next, None)) is not None:
                self._next += 1
                due()


class Shards:
    """The collectives of one model's buckets among the ranks of a host.

    Args:
        inward, outward: groups of the host's ranks, one for each direction: gathering a bucket must not wait until the
            next one is reduced.
        place: of this rank among them.
    """

    def __init__(self, inward: dist.ProcessGroup, outward: dist.ProcessGroup, place: int) -> None:
        self.places, self._place = outward.size(), place
        self._inward, self.outward = inward, outward
        self._rooms: dict[int, Room] = {}

    def room(self, index: int, tensor: torch.Tensor) -> Room:
        """Memory of bucket ``index``, made anew if it is another one now."""
        size, sizes = cut(tensor.numel(), self.places)
        found = self._rooms.get(index)
        if found is None or found.sizes != sizes or found.shard.dtype != tensor.dtype:
            kind: Any = {"dtype": tensor.dtype, "device": tensor.device}
            parts = torch.empty(self.places * sizes[self._place], **kind)
            shard, whole = torch.zeros(size, **kind), torch.empty(self.places * size, **kind)
            found = self._rooms[index] = Room(sizes, parts, shard, whole)
        return found

    def reduce(self, tensor: torch.Tensor, room: Room, done: Callable[[Exception | None], None]) -> None:
        """Starts to put this rank's shard of ``tensor`` into ``room.shard``; ``done`` is called once, by any thread.

        All-to-all, and a mean here: Gloo's own reduce-scatter is an all-reduce, and sums half precision in half
        precision.
        """
        own = room.sizes[self._place]

        def reduced(finished: torch.futures.Future[Any]) -> None:
            try:
                finished.value()
                _alone()
                torch.mean(room.parts.view(self.places, own), 0, out=room.shard[:own])
            except Exception as error:
                done(error)
            else:
                done(None)

        work = dist.all_to_all_single(
            room.parts, tensor.detach(), [own] * self.places, room.sizes, group=self._inward, async_op=True
        )
        work.get_future().then(reduced)

    def gather(self, shard: torch.Tensor, room: Room, done: Callable[[Exception | None], None]) -> None:
        """Starts to put the shards of all ranks into ``room.whole``; ``done`` is called once, by any thread."""
        _start(room.whole, shard, self.outward, done)

    def tell(self, words: Sequence[int], done: Callable[[list[list[int]], Exception | None], None]) -> None:
        """Starts to bring ``words`` to all ranks of the host; ``done`` gets those of each place."""
        heard = torch.empty(self.places * len(words), dtype=torch.int64)

        def told(error: Exception | None) -> None:
            done(heard.view(self.places, -1).tolist(), error)

        _start(heard, torch.tensor(words, dtype=torch.int64), self.outward, told)


def _start(
    whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup, done: Callable[[Exception | None], None]
) -> None:
    def gathered(finished: torch.futures.Future[Any]) -> None:
        try:
            finished.value()
        except Exception as error:
            done(error)
        else:
            done(None)

    try:
        work = _all_gather(whole, part, group=group, async_op=True)
    except Exception as error:
        done(error)
    else:
        work.get_future().then(gathered)


def _alone() -> None:
    """Lets the calling thread compute by itself: the cores are the training's."""
    if not getattr(_thread, "alone", False):
        _thread.alone = True
        torch.set_num_threads(1)
