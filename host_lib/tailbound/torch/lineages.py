"""Sound ranks that follow two lineages find each other, and one lineage gives way (clock-21).

A rank that is away while no other one is sound comes back sound, and in the lineage that the others have left. They
hold another state. So whoever comes back among the live ranks is asked for its lineage, and told the own one. Who finds
another one asks all live ranks. The lineage that fewer of them hold gives way; of equally many the older one. All ranks
that hear the same come to the same answer, and a rank that has not heard all asks again.
"""

from __future__ import annotations

import logging
import struct
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from tailbound.transport.reliable import Reliable
from tailbound.transport.requests import ask_each, of_form

log = logging.getLogger("tailbound")

_NAME = "lineage"
#: The question: who asks, and its lineage (0: it is not sound). The answer: lineage, whether it may change now.
_ASK, _SAID = struct.Struct("!HQ"), struct.Struct("!QB")
#: Seconds for a rank to answer.
_SAY = 0.25


def gives_way(held: Mapping[int, int], rank: int) -> bool:
    """Whether the lineage of ``rank`` is to give way: fewer hold it than another, or as many and it is older."""
    counts = Counter(held.values())
    return held[rank] != max(counts, key=lambda lineage: (counts[lineage], lineage))


class Lineages:
    """One rank's part in comparing lineages; it asks in a thread of its own.

    Args:
        reliable: the path to the other ranks.
        rank: the own one.
        live: gives the peers that answer, as far as is known.
        own: gives the own lineage; 0: this rank is not sound.
        changing: whether ranks are just about to follow another one (``synchronise``).
        give_way: called in that thread if it is the own lineage that gives way.
    """

    def __init__(
        self,
        reliable: Reliable,
        rank: int,
        live: Callable[[], Sequence[int]],
        own: Callable[[], int],
        changing: Callable[[], bool],
        give_way: Callable[[], None],
    ) -> None:
        self._reliable, self._rank, self._live = reliable, rank, live
        self._own, self._changing, self._give_way = own, changing, give_way
        self._seen: set[int] | None = None  # peers that were live when it was last looked
        self._doubted: set[int] = set()  # replaced as a whole by whatever thread doubts
        self._thread = ThreadPoolExecutor(1, "tailbound-lineages")
        self.asking: Future[None] | None = None
        reliable.before_close(lambda: self._thread.shutdown(wait=False, cancel_futures=True))
        reliable.serve(_NAME, of_form(_ASK, self._answer))

    def doubt(self, ranks: Collection[int]) -> None:
        """Their lineages may be other ones: they are asked from the next step on until they have answered."""
        self._doubted = self._doubted | set(ranks)

    def look(self, live: Collection[int]) -> None:
        """Between two steps, in the training thread: ``live`` peers; asks in the background where it has to."""
        came = set(live) - self._seen if self._seen is not None else set()
        self._seen = set(live)
        if came:
            self.doubt(came)
        if self._own() and self._doubted.intersection(live) and (self.asking is None or self.asking.done()):
            self.asking = self._thread.submit(self._compare)

    def ask(self, ranks: Collection[int]) -> dict[int, int]:
        """The lineages of ``ranks``, of those that answer in ``_SAY`` seconds; 0: not sound."""
        return {rank: lineage for rank, (lineage, _) in self._ask(ranks).items()}

    def _ask(self, ranks: Collection[int]) -> dict[int, tuple[int, bool]]:
        request = _ASK.pack(self._rank, self._own())

        def say(rank: int) -> tuple[int, bool] | None:
            body = self._reliable.pull(rank, _NAME, request, _SAY, _SAID.size)
            if len(body) != _SAID.size:
                return None
            lineage, changing = _SAID.unpack(body)
            return lineage, bool(changing)

        return ask_each(ranks, say, "tailbound-lineage")

    def _compare(self) -> None:
        own, live = self._own(), set(self._live()) - {self._rank}
        said = self._ask(self._doubted & live)
        alike = {rank for rank, (lineage, changing) in said.items() if lineage in (own, 0) and not changing}
        self._doubted = self._doubted - alike
        if alike == said.keys():
            return
        said |= self._ask(live - said.keys())
        if said.keys() != live or any(changing for _, changing in said.values()):
            return  # not heard from all: again after the next step
        held = {rank: lineage for rank, (lineage, _) in said.items() if lineage} | {self._rank: own}
        if own and own == self._own() and not self._changing() and gives_way(held, self._rank):
            log.warning(
                "rank %d: ranks have followed two states since none of those that heard each other was sound; those of "
                "rank(s) %s hold for all, and this rank takes theirs",
                self._rank,
                sorted(other for other in held if not gives_way(held, other)),
            )
            self._give_way()

    def _answer(self, rank: int, theirs: int) -> list[bytes]:
        own = self._own()
        if theirs and own and theirs != own:
            self.doubt([rank])
        return [_SAID.pack(own, self._changing())]
