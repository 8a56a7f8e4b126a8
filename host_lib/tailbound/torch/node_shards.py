"""Buckets among the ranks of a host: all-to-all and a mean before the exchange between hosts, all-gather after it.

A bucket of n entries is cut into as many shards as the host has ranks. The rank at place k gets the mean over the host
of shard k, has it averaged with those of its peers on other hosts, and hands what comes to all ranks of the host. All
shards of a bucket are of one size, a multiple of ``ALIGN`` entries; what lies behind the bucket's end is zero.

Every rank calls the collectives of a group in the order of buckets: Gloo and NCCL pair the calls of a group by their
number. So one thread brings buckets in, and another one hands them out (``Lane``). On a device, NCCL's kernels wait for
each other while they run. There all collectives of a step have one order: every bucket is reduced, then every bucket is
gathered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tailbound.errors import TransportError
from tailbound.torch.memory import Memory
from tailbound.torch.streams import Stream

#: Shards begin at multiples of so many entries: a cache line and vectors of the codec, in every type.
ALIGN = 16

#: PyTorch has renamed it: the newer name, and the older one.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
#: Says why a collective has failed, and what to do then.
_BUCKET = (
    "a bucket has not come from {}. If one has ended, its part of the gradient is lost to all of them: start this "
    "host's ranks again with the others from a checkpoint. Other hosts go on without this one meanwhile"
)
_SHARED = (
    "what replicas of a host share has not come from {}. Call boundary, hold, synchronize and forward on all of them "
    "between the same steps (an evaluation by one rank alone: on ddp_model.module)"
)


def cut(numel: int, places: int) -> tuple[int, list[int]]:
    """Entries of a shard, and how many of each of ``places`` shards are the bucket's."""
    size = -(-numel // (places * ALIGN)) * ALIGN
    return size, [min(max(numel - place * size, 0), size) for place in range(places)]


class BucketBuffers(NamedTuple):
    """Memory of one bucket."""

    sizes: list[int]  #: how many entries of each shard are the bucket's
    received: torch.Tensor  #: this rank's shard as each rank of the host has it; the beginning of ``gathered``
    shard: torch.Tensor  #: their mean, and zeros behind the bucket's end; averaged with other hosts in place
    gathered: torch.Tensor  #: the averages of all shards


class Lane:
    """A thread that does what it is given, in order; its actions raise nothing."""

    def __init__(self, name: str) -> None:
        self._actions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_do_all, args=(self._actions,), name=f"tailbound-host-{name}", daemon=True).start()

    def put(self, action: Callable[[], None]) -> None:
        """``action`` comes after all that were put before."""
        self._actions.put(action)

    def close(self) -> None:
        """Ends the thread behind all that it was given."""
        self._actions.put(None)


def _do_all(actions: SimpleQueue[Callable[[], None] | None]) -> None:
    torch.set_num_threads(1)  # the cores are the training's
    while (action := actions.get()) is not None:
        action()
        del action


class HostCollectives:
    """The collectives of one model's buckets among ``members``, the ranks of a host; a ``TransportError`` if one fails.

    ``inward``, ``outward``: groups, one for each direction, as gathering a bucket must not wait until the next one is
    reduced. With ``stream.one_order`` the first one carries all buckets. The other one is of Gloo in any case.
    """

    def __init__(
        self,
        stream: Stream,
        inward: dist.ProcessGroup,
        outward: dist.ProcessGroup,
        members: Sequence[int],
        place: int,
    ) -> None:
        self.places, self._place, self._members = len(members), place, members
        self._stream, self._inward, self._outward = stream, inward, outward
        self._gathering = inward if stream.one_order else outward
        self._memory = Memory()

    def warm_up(self) -> None:
        """Does each collective of a device once, on all ranks of the host: NCCL connects them in the first one."""
        if self._stream.one_order:
            tensor = torch.zeros(self.places * ALIGN, device=self._stream.device)
            self.reduce(tensor, buffers := self.buffers(0, tensor))
            self.gather(buffers.shard, buffers)

    def buffers(self, index: int, tensor: torch.Tensor) -> BucketBuffers:
        """Memory of bucket ``index``, made anew if it is another one now."""
        size, sizes = cut(tensor.numel(), self.places)
        shard = self._memory.part(index, "shard", size, tensor.dtype, tensor.device)
        gathered = self._memory.part(index, "gathered", self.places * size, tensor.dtype, tensor.device)
        received = gathered[: self.places * sizes[self._place]]  # summed up before anything is gathered
        return BucketBuffers(sizes, received, shard, gathered)

    def reduce(self, tensor: torch.Tensor, buffers: BucketBuffers) -> None:
        """Puts this rank's shard of ``tensor`` into ``buffers.shard``; halves are summed in float32."""
        own = buffers.sizes[self._place]
        given = buffers.received, tensor.detach(), [own] * self.places, buffers.sizes
        self._wait(lambda: dist.all_to_all_single(*given, group=self._inward))
        torch.mean(buffers.received.view(self.places, own), 0, out=buffers.shard[:own])
        buffers.shard[own:].zero_()  # an average of zeros need not be one

    def gather(self, shard: torch.Tensor, buffers: BucketBuffers) -> None:
        """Puts the shards of all ranks into ``buffers.gathered``."""
        self._wait(lambda: _all_gather(buffers.gathered, shard, group=self._gathering))

    def tell(self, words: Sequence[int]) -> list[list[int]]:
        """Brings ``words`` to all ranks of the host, and returns those of each place."""
        own, heard = torch.tensor(words, dtype=torch.int64), torch.empty(self.places * len(words), dtype=torch.int64)
        self._wait(lambda: _all_gather(heard, own, group=self._outward))
        found: list[list[int]] = heard.view(self.places, -1).tolist()
        return found

    def collect(self, own: object) -> list[Any]:
        """What each place brings, as objects."""
        brought: list[Any] = [None] * self.places
        self._wait(lambda: dist.all_gather_object(brought, own, self._outward), _SHARED)
        return brought

    def from_first(self, own: object) -> Any:
        """What the host's first rank brings, as objects."""
        brought = [own]
        self._wait(lambda: dist.broadcast_object_list(brought, self._members[0], self._outward), _SHARED)
        return brought[0]

    def _wait(self, collective: Callable[[], object], words: str = _BUCKET) -> None:
        try:
            collective()
        except RuntimeError as error:
            own = self._members[self._place]
            others = [rank for rank in self._members if rank != own]
            why = words.format(f"the other ranks of this host, {others}: {error}")
            raise TransportError(f"rank {own}: {why}") from error
