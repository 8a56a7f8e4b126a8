"""Several ranks a host: each averages a part of every bucket with other hosts, and the host shares what comes.

Between hosts there is a job for each place on a host, of as many ranks as there are hosts, as in HSDP. Replicas are
whole on every rank. What a job has lost is missing on all ranks of a host alike, so that a host is one replica: its
first rank keeps it equal to those of other hosts, and hands on what it takes.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tailbound.errors import TailboundError, TransportError
from tailbound.torch.memory import check
from tailbound.torch.node import Holds, Node
from tailbound.torch.node_shards import HostCollectives, Lane
from tailbound.torch.replica import Replica
from tailbound.torch.resync import Resync
from tailbound.torch.state import TailboundState
from tailbound.torch.streams import stream_of

_NONE_ALONE = (
    "the ranks of a host put their buckets together; leave out tailbound.torch.batches, or give register "
    'node_group="off" (TAILBOUND_NODE_GROUP=off), so that every rank stands for itself'
)


class NodeState(TailboundState):
    """What ``register`` returns with a ``node_group``: see ``TailboundState`` for its options and methods.

    ``rank`` and ``ranks`` are those of the job: the number of this host among the hosts, and the number of hosts. Who
    writes a file on one rank alone asks ``torch.distributed.get_rank()``. ``synchronize`` is to be called on all ranks
    of a host. Where one holds, all its jobs do; where its first rank is about to change replicas, the step then stays
    open until the next forward pass, which all make.

    Args:
        group, node, device: of the model, this rank's host, and where buckets lie.
        timeout: seconds to wait for the other ranks at the start, and for those of this host ever after.
    """

    shares_scale = True
    _joinless = (
        "the ranks of a host make every forward pass together, and DDP's join() lets one go on without: leave join() "
        'out and give all ranks as many batches, or give register node_group="off" (TAILBOUND_NODE_GROUP=off)'
    )

    def __init__(
        self, group: dist.ProcessGroup, node: Node, *, device: torch.device, timeout: float, **options: Any
    ) -> None:
        self._node, self._groups = node, list[dist.ProcessGroup]()
        self._compares = node.place == 0  # the first one alone is told what the host has missed, and hands on all
        self._stream = stream = stream_of(device)
        try:
            for of_peers, backend in (False, stream.backend), (False, "gloo"), (True, "gloo"):
                self._groups.append(node.group(of_peers=of_peers, timeout=timeout, backend=backend))
            inward, outward, peers = self._groups
            self._collectives = HostCollectives(stream, inward, outward, node.members, node.place)
            self._collectives.warm_up()
            super().__init__(peers, timeout=timeout, **options)
            self._holds: Holds | None = None
            if self.communicator is not None:
                name = self._collectives.from_first(f"tailbound-hold/{uuid.uuid4()}")
                self._holds = Holds(name, node.place, node.places, self.communicator.hold)
                self._endings.insert(0, self._holds.close)
        except BaseException:
            if self.communicator is not None:
                self.communicator.close()
            self._end_groups()
            raise
        self.everyone, self.shards, self.together = group, node.places, _NONE_ALONE
        self._inward, self._outward = Lane("in"), Lane("out")
        self._reduced: list[Callable[[], None]] = []  # what is still to be handed to ``_outward``
        self._endings += self._inward.close, self._outward.close
        self._missed = 0  # rows of this step, here
        self._between = True  # no bucket of the next step has come
        self._failure: TailboundError | None = None
        self._told = False  # all ranks of the host know of it, as far as they can be reached

    def close(self, *, farewell: bool = True) -> None:
        """As in ``TailboundState``; the host's groups end, too."""
        try:
            if self._holds is not None:
                self._holds.close()
                self._holds = None
            super().close(farewell=farewell)
        finally:
            self._inward.close()
            self._outward.close()
            self._end_groups()

    def _hold(self, on: bool) -> None:
        if self._holds is not None:
            self._holds.set(on)

    def _end_groups(self) -> None:
        while self._groups:
            group = self._groups.pop()
            if dist.is_initialized():  # else they have ended with the default group
                with contextlib.suppress(ValueError):
                    dist.destroy_process_group(group)

    def average(self, index: int, tensor: torch.Tensor, last: bool) -> torch.futures.Future[torch.Tensor]:
        """As in ``TailboundState``; a rank of this host that does not come is waited for, ``timeout`` seconds at most.

        All ranks of a host fail in the same step. One that cannot average takes part in what is left of the step, so
        that its neighbours' collectives stay paired, and tells them at its end.
        """
        check(index, tensor)
        if self._failure is not None and self._told and (self._between or index == 0):
            raise self._failure
        self._between = last
        if index == 0:
            with self._failing():
                self.before_backward()
        buffers = self._collectives.buffers(index, tensor)
        future, mark = self._stream.future(), self._stream.mark()

        def bring() -> None:
            averaged = None
            with self._failing(), self._stream.use(mark):
                self._collectives.reduce(tensor, buffers)
                if self._failure is None:  # to other hosts this one is dead otherwise
                    averaged = self._average(index, buffers.shard, last)
            self._reduced.append(lambda: hand_out(averaged))
            if last or not self._stream.one_order:
                for action in self._reduced:
                    self._outward.put(action)
                self._reduced.clear()

        def hand_out(averaged: torch.futures.Future[torch.Tensor] | None) -> None:
            shard = buffers.shard  # whatever is in it, if there is no average: every rank has to gather
            with self._failing(), self._stream.use():  # which then comes behind the average
                if averaged is not None:
                    shard = averaged.wait()
            with self._failing(), self._stream.use():
                self._collectives.gather(shard, buffers)
            if last:
                with self._failing():
                    self._tell()
                self._told = self._failure is not None
            try:
                with self._stream.use():
                    future.set_result(buffers.gathered[: tensor.numel()])
            except Exception as error:  # of the device; a future that never completes would hang DDP
                self._fail(error)
                future.set_exception(error)  # type: ignore[arg-type]

        def checked(completed: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            if self._failure is not None and last:
                raise self._failure
            return completed.value()

        self._inward.put(bring)
        return future.then(checked)

    def _tell(self) -> None:
        """At the end of a step the ranks of the host tell each other how it went."""
        missed, self._missed = self._missed, 0
        takes = self.resync is not None and self.resync.about_to_take
        words = [missed, takes, self._failure is not None, self.overflowed, self.steps.void]
        heard = self._collectives.tell(words)
        some_missed, _, _, overflowed, void = (any(each) for each in zip(*heard, strict=True))
        if overflowed:  # what another thread has noted meanwhile stays
            self.overflowed = True
        self._takes = bool(heard[0][1])
        if self.resync is not None and self._compares and some_missed:
            self.resync.unsound()
        self.steps.came(void=void)
        failed = [rank for rank, words in zip(self._node.members, heard, strict=True) if words[2]]
        if failed:
            self._fail(
                TransportError(
                    f"rank {self._own}: rank(s) {failed} of this host cannot average any more, and their part of every "
                    "bucket is with nobody else; their own errors say why. Start this host's ranks again with the "
                    "others from a checkpoint. Other hosts go on without this one meanwhile"
                )
            )

    def rejoin(self) -> None:
        """As in ``TailboundState``; what it raises is raised at the end of the next step, on all ranks of the host."""
        with self._failing():
            super().rejoin()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """An error within the context ends averaging, and is raised at the end of the step."""
        try:
            yield
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Averaging is over here; the first cause is the one that is raised."""
        if self._failure is None:
            if not isinstance(error, TailboundError):
                cause = error
                error = TransportError(
                    f"rank {self._own}: a bucket could not be averaged: {cause!r}; start this host's ranks again with "
                    "the others from a checkpoint"
                )
                error.__cause__ = cause
            self._failure = error

    def note_missing(self, rows: int) -> None:
        """An average has come without ``rows`` of its rows: all ranks of the host miss them."""
        self._missed += rows

    @property
    def _own(self) -> int:
        return self._node.members[self._node.place]

    def _tensors(self, replica: Replica) -> tuple[int, ...]:
        return (-(-replica.entries // self.shards),)

    def end_step(self, *, still: bool) -> None:
        """As in ``TailboundState``; what the host's first rank takes is handed on to all of them."""
        ended = self.steps.ended is not None
        super().end_step(still=still)
        if ended and still and self._takes and self.resync is not None:
            self._takes = False
            self._hand_on(self.resync)

    def synchronize(self, timeout: float = 30.0) -> bool:
        """As in ``TailboundState``, on all ranks of all hosts; those of a host are equal to the bit then, too."""
        self._refuse_detached("synchronize")
        if self._compares:
            well = super().synchronize(timeout)
        else:
            self.end_step(still=True)
            well = True
        resync = self.resync
        if resync is None:
            return well
        replica = resync.replica
        replica.freeze()
        standings = self._collectives.collect((well, resync.standing()))
        well, first = standings[0]
        replica.arranged = any(other.form != first.form for _, other in standings)
        pairs = [zip(other.slices, first.slices, strict=False) for _, other in standings]
        replica.written = {which for pair in pairs for which, (a, b) in enumerate(pair) if a != b}
        if replica.written or replica.arranged:
            self._hand_on(resync)
        return bool(well)

    def _hand_on(self, resync: Resync) -> None:
        """Gives all ranks of this host what its first rank has changed."""
        replica, changes = resync.replica, None
        if self._compares:
            form = resync.tell_form() if replica.arranged else None
            changes = form, [(which, b"".join(replica.copy(which))) for which in sorted(replica.written)]
        told, slices = self._collectives.from_first(changes)
        if not self._compares:
            if told is not None:
                resync.take_form(told)
            for which, data in slices:
                replica.write(which, memoryview(data))
            replica.freeze()
        replica.written, replica.arranged = set(), False
