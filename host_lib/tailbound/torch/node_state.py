"""Several ranks a host: each averages a part of every bucket with other hosts, and the host shares what comes.

Between hosts there is a job for each place on a host, of as many ranks as there are hosts, as in HSDP. Replicas are
whole on every rank. What a job has lost is missing on all ranks of a host alike, so that a host is one replica: its
first rank keeps it equal to those of other hosts, and hands on what it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tailbound.errors import ConfigError, TailboundError, TransportError
from tailbound.torch.memory import check
from tailbound.torch.node import Node
from tailbound.torch.node_shards import InOrder, Shards
from tailbound.torch.replica import Replica
from tailbound.torch.resync import Resync
from tailbound.torch.state import TailboundState

_TOGETHER = "the ranks of a host put their buckets together; leave out tailbound.torch.batches, or node_group"
#: What a rank changed in its replica: how optimizers are arranged, and slices with their bytes.
_Changes = tuple[bytes | None, list[tuple[int, bytes]]]


class NodeState(TailboundState):
    """What ``register`` returns with a ``node_group``: see ``TailboundState`` for its options and methods.

    ``rank`` and ``ranks`` are those of the job: the number of this host, and of all hosts. ``hold`` and ``synchronise``
    are to be called on all ranks of a host.

    Args:
        group: of the model.
        node: this rank's host.
        **options: of ``TailboundState``.

    Raises:
        ConfigError: options that a host cannot have.
    """

    def __init__(self, group: dist.ProcessGroup, node: Node, **options: Any) -> None:
        schedule = options.get("schedule", "synchronous")
        if schedule != "synchronous":
            raise ConfigError(
                f'schedule="{schedule}": the ranks of a host put their buckets together in the step that they are of; '
                'use schedule="synchronous", or leave out node_group'
            )
        self._node = node
        self._shards = Shards(node.group(of_peers=False), node.group(of_peers=False), node.place)
        super().__init__(node.group(of_peers=True), **options)
        self.everyone, self.shards, self.together = group, len(node.members), _TOGETHER
        self._launches, self._gathers, self._number = InOrder(), InOrder(), 0
        self._missed = 0  # rows of this step, here
        self._takes = False  # the first rank of the host may change its replica at the next boundary
        self._broken: TailboundError | None = None

    def average(self, index: int, tensor: torch.Tensor, last: bool) -> torch.futures.Future[torch.Tensor]:
        """As in ``TailboundState``; a rank of this host that does not come is waited for.

        Raises:
            TransportError: a rank of this host has died, too.
        """
        check(index, tensor)
        if self._broken is not None:
            raise self._broken
        if index == 0:
            self.before_backward()
        number, self._number = self._number, self._number + 1
        room = self._shards.room(index, tensor)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        errors: list[TailboundError] = []

        def over(error: Exception | None = None) -> None:
            if error is not None:
                self._broken = self._in_words(error)
                errors.append(self._broken)
            future.set_result(room.whole[: tensor.numel()])  # one that never completes would hang DDP

        def reduced(error: Exception | None) -> None:
            self._launches.ready(number, lambda: launch(error))

        def launch(error: Exception | None) -> None:
            try:
                if error is not None:
                    raise error
                averaged = self._average(index, room.shard, last)
            except Exception as failed:
                self._gathers.ready(number, lambda failed=failed: over(failed))  # type: ignore[misc]
            else:
                averaged.then(lambda done: self._gathers.ready(number, lambda: gather(done)))

        def gather(done: torch.futures.Future[torch.Tensor]) -> None:
            try:
                shard = done.value()
            except Exception as failed:
                over(failed)
            else:
                self._shards.gather(shard, room, self._ending(over) if last else over)

        def checked(completed: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            if errors:
                raise errors[0]
            return completed.value()

        try:
            self._shards.reduce(tensor, room, reduced)
        except RuntimeError as error:
            reduced(error)
        return future.then(checked)

    def _ending(self, over: Callable[[Exception | None], None]) -> Callable[[Exception | None], None]:
        """To be called when the last bucket of a step is there: tells the host what was missed, then calls ``over``."""

        def told(heard: list[list[int]], error: Exception | None) -> None:
            if error is None:
                self._takes = bool(heard[0][1])
                if self.resync is not None and self._first:
                    self.resync.note_missing(sum(missed for missed, _ in heard))
            over(error)

        def gathered(error: Exception | None) -> None:
            if error is not None:
                over(error)
                return
            missed, self._missed = self._missed, 0
            self._shards.tell([missed, self.resync is not None and self.resync.about_to_take], told)

        return gathered

    def note_missing(self, rows: int) -> None:
        """An average has come without ``rows`` of its rows: all ranks of the host miss them."""
        self._missed += rows

    @property
    def _first(self) -> bool:
        return self._node.place == 0

    def _entries(self, replica: Replica) -> int:
        return -(-replica.entries // self.shards)

    def _end_step(self, *, still: bool) -> None:
        ended = self.ended is not None
        super()._end_step(still=still)
        if ended and still and self._takes and self.resync is not None:
            self._takes = False
            self._hand_on(self.resync.replica)

    def synchronise(self, timeout: float = 30.0) -> bool:
        """As in ``TailboundState``, on all ranks of all hosts; those of a host are equal to the bit then, too."""
        if self._first:
            well = super().synchronise(timeout)
        else:
            self.boundary()
            well = True
        if self.resync is None:
            return well
        return self._agree(self.resync, well)

    def _agree(self, resync: Resync, well: bool) -> bool:
        """Gives all ranks of this host what its first rank holds, and says."""
        replica = resync.replica
        replica.freeze()
        own = resync.standing()
        standings: list[Any] = [None] * self.shards
        self._together(lambda: dist.all_gather_object(standings, (well, own), self._shards.outward))
        well, first = standings[0]
        replica.arranged = any(other.form != first.form for _, other in standings)
        pairs = [zip(other.slices, first.slices, strict=False) for _, other in standings]
        replica.written = {which for pair in pairs for which, (a, b) in enumerate(pair) if a != b}
        if replica.arranged:
            replica.written = set(range(replica.slices))
        if replica.written:
            self._hand_on(replica)
        return bool(well)

    def _hand_on(self, replica: Replica) -> None:
        """Gives all ranks of this host what its first rank has changed."""
        said: list[_Changes | None] = [self._changes(replica) if self._first else None]
        self._together(lambda: dist.broadcast_object_list(said, self._node.members[0], self._shards.outward))
        changes = said[0]
        if not self._first and changes is not None:
            told, slices = changes
            if told is not None:
                replica.arrange(told)
            for which, data in slices:
                replica.write(which, memoryview(data))
            replica.freeze()
        replica.written, replica.arranged = set(), False

    @staticmethod
    def _changes(replica: Replica) -> _Changes:
        told = replica.describe() if replica.arranged else None
        return told, [(which, b"".join(replica.copy(which))) for which in sorted(replica.written)]

    def _together(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise self._in_words(error) from error

    def _in_words(self, error: Exception) -> TailboundError:
        if isinstance(error, TailboundError):
            return error
        others = [rank for rank in self._node.members if rank != self._node.members[self._node.place]]
        return TransportError(
            f"rank {self._node.members[self._node.place]}: a bucket has not come from the other ranks of this host, "
            f"{others}: {error}. If one has ended, its part of the gradient is lost to all of them: start this host's "
            "ranks again with the others from a checkpoint. Other hosts go on without this one meanwhile"
        )

    def stats(self) -> dict[str, Any]:
        """As in ``TailboundState``; of the replica only where it is kept equal, on the host's first rank."""
        stats = super().stats()
        if not self._first:
            stats.pop("replica", None)
        return stats
