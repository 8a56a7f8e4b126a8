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

from tailbound.errors import TransportError

#: Shards begin at multiples of so many entries: a cache line and vectors of the codec, in every type.
ALIGN = 16

#: PyTorch has renamed it: ``all_gather_single`` is the newer name.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_thread = threading.local()


def cut(numel: int, places: int) -> tuple[int, list[int]]:
    """Entries of a shard, and how many of each of ``places`` shards are the bucket's."""
    size = -(-numel // (places * ALIGN)) * ALIGN
    return size, [min(max(numel - place * size, 0), size) for place in range(places)]


@dataclass
class BucketBuffers:
    """Memory of one bucket.

    Attributes:
        sizes: how many entries of each shard are the bucket's.
        received: this rank's shard as each rank of the host has it, [places * sizes[place]]; the memory of
            ``gathered``.
        shard: their mean, and zeros behind the bucket's end; averaged with other hosts in place.
        gathered: the averages of all shards.
    """

    sizes: list[int]
    received: torch.Tensor
    shard: torch.Tensor
    gathered: torch.Tensor


class InOrder:
    """Does what becomes ready, by whatever thread, in the order of numbers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: dict[int, tuple[Callable[[], None], Callable[[Exception], None]]] = {}
        self._next = 0

    def ready(self, number: int, action: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """``action`` is number ``number`` of 0, 1, 2, ...; each comes once.

        What it raises is given to ``failed``, which raises nothing, and the actions behind it go on.
        """
        with self._lock:
            self._ready[number] = action, failed
            while (due := self._ready.pop(self._next, None)) is not None:
                self._next += 1
                act, give_up = due
                try:
                    act()
                except Exception as error:
                    give_up(error)


class HostCollectives:
    """The collectives of one model's buckets among the ranks of a host.

    Args:
        inward, outward: groups of the host's ranks, one for each direction: gathering a bucket must not wait until the
            next one is reduced.
        members: ranks of the host.
        place: of this rank among them.
    """

    def __init__(
        self, inward: dist.ProcessGroup, outward: dist.ProcessGroup, members: Sequence[int], place: int
    ) -> None:
        self.places, self._place, self._members = len(members), place, members
        self._inward, self._outward = inward, outward
        self._buffers: dict[int, BucketBuffers] = {}

    def buffers(self, index: int, tensor: torch.Tensor) -> BucketBuffers:
        """Memory of bucket ``index``, made anew if it is another one now."""
        size, sizes = cut(tensor.numel(), self.places)
        found = self._buffers.get(index)
        if found is None or found.sizes != sizes or found.shard.dtype != tensor.dtype:
            kind: Any = {"dtype": tensor.dtype, "device": tensor.device}
            shard, gathered = torch.zeros(size, **kind), torch.empty(self.places * size, **kind)
            received = gathered[: self.places * sizes[self._place]]  # summed up before anything is gathered
            found = self._buffers[index] = BucketBuffers(sizes, received, shard, gathered)
        return found

    def reduce(self, tensor: torch.Tensor, buffers: BucketBuffers, done: Callable[[Exception | None], None]) -> None:
        """Starts to put this rank's shard of ``tensor`` into ``buffers.shard``; ``done`` is called once, by any thread.

        All-to-all, and a mean here: Gloo's own reduce-scatter is an all-reduce, and sums half precision in half
        precision.
        """
        own, training = buffers.sizes[self._place], threading.get_ident()

        def reduced(error: Exception | None) -> None:
            try:
                if error is None:
                    if threading.get_ident() != training:  # the collective may be over before this is put behind it
                        _use_one_thread()
                    torch.mean(buffers.received.view(self.places, own), 0, out=buffers.shard[:own])
                    buffers.shard[own:].zero_()  # an average of zeros need not be one
            except Exception as failed:
                error = failed
            done(error)

        self._start(
            lambda: dist.all_to_all_single(
                buffers.received, tensor.detach(), [own] * self.places, buffers.sizes, group=self._inward, async_op=True
            ),
            reduced,
        )

    def gather(self, shard: torch.Tensor, buffers: BucketBuffers, done: Callable[[Exception | None], None]) -> None:
        """Starts to put the shards of all ranks into ``buffers.gathered``; ``done`` is called once, by any thread."""
        self._start(lambda: _all_gather(buffers.gathered, shard, group=self._outward, async_op=True), done)

    def tell(self, words: Sequence[int], done: Callable[[list[list[int]], Exception | None], None]) -> None:
        """Starts to bring ``words`` to all ranks of the host; ``done`` gets those of each place."""
        own, heard = torch.tensor(words, dtype=torch.int64), torch.empty(self.places * len(words), dtype=torch.int64)

        def told(error: Exception | None) -> None:
            done(heard.view(self.places, -1).tolist(), error)

        self._start(lambda: _all_gather(heard, own, group=self._outward, async_op=True), told)

    def collect(self, own: object) -> list[Any]:
        """What each place brings, as objects; waits for all ranks of the host.

        Raises:
            TransportError: one has not come.
        """
        brought: list[Any] = [None] * self.places
        self._wait(lambda: dist.all_gather_object(brought, own, self._outward))
        return brought

    def from_first(self, own: object) -> Any:
        """What the host's first rank brings; waits for it.

        Raises:
            TransportError: it has not come.
        """
        brought = [own]
        self._wait(lambda: dist.broadcast_object_list(brought, self._members[0], self._outward))
        return brought[0]

    def _wait(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise self._lost(
                error, "what replicas of a host share has", "Call boundary, hold, synchronise and forward on all of "
                "them between the same steps (an evaluation by one rank alone: on ddp_model.module)"
            ) from error  # fmt: skip

    def _start(self, collective: Callable[[], Any], done: Callable[[Exception | None], None]) -> None:
        """``collective`` gives its work; ``done`` gets None, or a ``TransportError`` that says who is missing."""

        def ended(finished: torch.futures.Future[Any]) -> None:
            try:
                finished.value()
            except Exception as error:
                done(lost(error))
            else:
                done(None)

        def lost(error: Exception) -> TransportError:
            found = self._lost(
                error, "a bucket has", "If one has ended, its part of the gradient is lost to all of them: start this "
                "host's ranks again with the others from a checkpoint. Other hosts go on without this one meanwhile"
            )  # fmt: skip
            found.__cause__ = error
            return found

        try:
            work = collective()
        except RuntimeError as error:
            done(lost(error))
        else:
            work.get_future().then(ended)

    def _lost(self, error: Exception, what: str, advice: str) -> TransportError:
        own = self._members[self._place]
        others = [rank for rank in self._members if rank != own]
        return TransportError(
            f"rank {own}: {what} not come from the other ranks of this host, {others}: {error}. {advice}"
        )


def _use_one_thread() -> None:
    """Lets the calling thread compute by itself: the cores are the training's."""
    if not getattr(_thread, "told", False):
        _thread.told = True
        torch.set_num_threads(1)
