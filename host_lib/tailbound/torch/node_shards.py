"""Buckets among the ranks of a host: all-to-all and a mean before the exchange between hosts, all-gather after it.

A bucket of n entries is cut into as many shards as the host has ranks. The rank at place k gets the mean over the host
of shard k, has it averaged with those of its peers on other hosts, and hands what comes to all ranks of the host. All
shards of a bucket are of one size, a multiple of ``ALIGN`` entries; what lies behind the bucket's end is zero.

Every rank calls the collectives of a group in the order of buckets, whatever comes first: Gloo and NCCL pair the calls
of a group by their number. On a device, NCCL's kernels wait for each other while they run. There all collectives of a
step have one order: every bucket is reduced, then every bucket is gathered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from tailbound.errors import TransportError
from tailbound.torch.streams import CudaStream, Stream

#: Shards begin at multiples of so many entries: a cache line and vectors of the codec, in every type.
ALIGN = 16

#: PyTorch has renamed it: the newer name, and the older one.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_thread = threading.local()
#: Gets what each place has said, or why that has not come.
Told: TypeAlias = Callable[[list[list[int]], Exception | None], None]


class Inside(NamedTuple):
    """How buckets go from rank to rank within a host.

    Attributes:
        backend: of the groups that carry them.
        stream: in which averages of shards are put in order.
        one_order: the collectives of a step may not overtake each other, in whatever direction.
    """

    backend: str
    stream: Stream
    one_order: bool = False


def inside_of(device: torch.device) -> Inside:
    """Gloo for memory of the host, NCCL for a CUDA device."""
    if device.type == "cuda":
        return Inside("nccl", CudaStream(device), one_order=True)
    return Inside("gloo", Stream(device))


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
    """Does what becomes ready, by whatever thread, in the order of numbers.

    Args:
        stream: on a device, an action's work comes behind all that was queued where it became ready.
        until: actions from this number on wait until they are allowed; None: they are.
    """

    def __init__(self, stream: Stream, until: int | None = None) -> None:
        self._stream, self._until = stream, until
        self._lock = threading.Lock()
        self._ready: dict[int, tuple[Any, Callable[[], None], Callable[[Exception], None]]] = {}
        self._next = 0

    def ready(self, number: int, action: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """``action`` is number ``number`` of 0, 1, 2, ...; each comes once.

        What it raises is given to ``failed``, which raises nothing, and the actions behind it go on.
        """
        mark: Any = None
        try:
            mark = self._stream.mark()
        except Exception as error:  # a device that is gone: the actions behind this one must not wait for it
            action = _raising(error)
        with self._lock:
            self._ready[number] = mark, action, failed
            self._go_on()

    def allow(self, until: int) -> None:
        """Actions below ``until`` may be done."""
        with self._lock:
            if self._until is not None:
                self._until = until
                self._go_on()

    def _go_on(self) -> None:
        while self._until is None or self._next < self._until:
            due = self._ready.pop(self._next, None)
            if due is None:
                return
            self._next += 1
            mark, act, give_up = due
            try:
                with self._stream.use(mark):
                    act()
            except Exception as error:
                give_up(error)


def _raising(error: Exception) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


class HostCollectives:
    """The collectives of one model's buckets among the ranks of a host.

    Args:
        inside: how buckets go.
        inward, outward: groups of the host's ranks, one for each direction: gathering a bucket must not wait until the
            next one is reduced. With ``one_order`` the first one carries all buckets, and is of the backend; the other
            one is of Gloo in any case.
        members: ranks of the host.
        place: of this rank among them.
    """

    def __init__(
        self,
        inside: Inside,
        inward: dist.ProcessGroup,
        outward: dist.ProcessGroup,
        members: Sequence[int],
        place: int,
    ) -> None:
        self.places, self._place, self._members = len(members), place, members
        self._inside, self._inward, self._outward = inside, inward, outward
        self._gathering = inward if inside.one_order else outward
        self._buffers: dict[int, BucketBuffers] = {}

    def warm_up(self) -> None:
        """Does each collective of a device once, on all ranks of the host: NCCL connects them in the first one.

        Raises:
            TransportError: that does not work.
        """
        if not self._inside.one_order:
            return
        tensor = torch.zeros(self.places * ALIGN, device=self._inside.stream.device)
        buffers, ended = self._made(tensor), SimpleQueue[Exception | None]()
        for source, start in (tensor, self.reduce), (buffers.shard, self.gather):
            start(source, buffers, ended.put)
            if (failure := ended.get()) is not None:
                raise failure

    def buffers(self, index: int, tensor: torch.Tensor) -> BucketBuffers:
        """Memory of bucket ``index``, made anew if it is another one now."""
        _, sizes = cut(tensor.numel(), self.places)
        found = self._buffers.get(index)
        if found is None or found.sizes != sizes or found.shard.dtype != tensor.dtype:
            found = self._buffers[index] = self._made(tensor)
        return found

    def _made(self, tensor: torch.Tensor) -> BucketBuffers:
        size, sizes = cut(tensor.numel(), self.places)
        kind: Any = {"dtype": tensor.dtype, "device": tensor.device}
        shard, gathered = torch.zeros(size, **kind), torch.empty(self.places * size, **kind)
        received = gathered[: self.places * sizes[self._place]]  # summed up before anything is gathered
        return BucketBuffers(sizes, received, shard, gathered)

    def reduce(self, tensor: torch.Tensor, buffers: BucketBuffers, done: Callable[[Exception | None], None]) -> None:
        """Starts to put this rank's shard of ``tensor`` into ``buffers.shard``; ``done`` is called once, by any thread.

        Sums are taken in the type's own precision for float32 and float64, and in float32 for halves.
        """
        own = buffers.sizes[self._place]

        def reduced(error: Exception | None) -> None:
            try:
                if error is None:
                    torch.mean(buffers.received.view(self.places, own), 0, out=buffers.shard[:own])
                    buffers.shard[own:].zero_()  # an average of zeros need not be one
            except Exception as failed:
                error = failed
            done(error)

        received, sizes = buffers.received, [own] * self.places
        self._start(
            lambda: dist.all_to_all_single(
                received, tensor.detach(), sizes, buffers.sizes, group=self._inward, async_op=True
            ),
            reduced,
        )

    def gather(self, shard: torch.Tensor, buffers: BucketBuffers, done: Callable[[Exception | None], None]) -> None:
        """Starts to put the shards of all ranks into ``buffers.gathered``; ``done`` is called once, by any thread."""
        self._start(lambda: _all_gather(buffers.gathered, shard, group=self._gathering, async_op=True), done)

    def tell(self, words: Sequence[int], done: Told) -> None:
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
                error, "what replicas of a host share has", "Call boundary, hold, synchronize and forward on all of "
                "them between the same steps (an evaluation by one rank alone: on ddp_model.module)"
            ) from error  # fmt: skip

    def _start(self, collective: Callable[[], Any], done: Callable[[Exception | None], None]) -> None:
        """``collective`` gives its work; ``done`` gets None, or a ``TransportError`` that says who is missing."""

        caller = threading.get_ident()

        def ended(finished: torch.futures.Future[Any]) -> None:
            if threading.get_ident() != caller:  # the collective may be over before this is put behind it
                _settle()
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


def _settle() -> None:
    """Lets the calling thread, which is a group's, compute by itself: the cores are the training's."""
    if not getattr(_thread, "told", False):
        _thread.told = True
        threading.current_thread().name = "tailbound-host"  # ``streams.settle_thread`` goes by it
        torch.set_num_threads(1)
