"""Sound ranks compare digests, slice by slice: what parts replicas without a lost result has no other sign (clock-33).

A bit that flips in memory, an optimizer that is not deterministic, a rank that changes a weight: the transport knows
nothing of these. In the first of every so many steps each sound rank takes a digest of one slice a step, keeps it for a
while, and asks one peer for its own. Where they differ it asks all others, and goes by what most of them hold. Ranks of
two lineages are no fault of memory: ``lineages`` is told of them.
"""

from __future__ import annotations

import logging
import queue
import struct
import threading
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from tailbound.errors import TransportError
from tailbound.torch.meeting import holds_most
from tailbound.torch.moment import Moment
from tailbound.torch.replica import Replica
from tailbound.transport.reliable import Refusal, Reliable
from tailbound.transport.requests import of_form

log = logging.getLogger("tailbound")

_NAME = "digest"
_ASK = struct.Struct("!IH")
#: The answer begins with the lineage.
_LINEAGE = struct.Struct("!Q")
#: Bytes of it that follow, and are about learning rates.
_RATES = 8
#: Digests that are kept, and seconds that a rank waits for its own to be taken before it refuses, and for an answer.
_KEPT, _WAIT, _ANSWER = 64, 2.0, 5.0


class Check(NamedTuple):
    """Slice ``which`` is to be compared after ``step`` with ``peer``; ``patience``: seconds to wait for its end."""

    step: int
    which: int
    peer: int
    patience: float


class Digests:
    """One rank's part in comparing, in a thread of its own: a peer that does not answer holds nothing else up.

    Args:
        reliable: the path to the other ranks.
        replica: the state.
        moment: after which step it stands.
        rank, ranks: of the job.
        live: gives the peers that answer, as far as is known.
        lineage: of this rank; 0: it has missed a result.
        found: called in that thread with what was compared, and ``compare``'s answer.
        doubt: called in it with ranks that hold something else and are of another lineage.
    """

    def __init__(
        self,
        reliable: Reliable,
        replica: Replica,
        moment: Moment,
        rank: int,
        ranks: int,
        live: Callable[[], Sequence[int]],
        lineage: Callable[[], int],
        found: Callable[[Check, list[int] | None], None],
        doubt: Callable[[Collection[int]], None],
    ) -> None:
        self._reliable, self._replica, self._moment = reliable, replica, moment
        self._rank, self._ranks, self._live, self._lineage, self._found = rank, ranks, live, lineage, found
        self._doubt = doubt
        #: ranks that differed when it was compared last had other learning rates
        self.rates_unlike = False
        self._kept: dict[tuple[int, int], tuple[int, bytes]] = {}  # lineage and digest, by step and slice
        self._changed = threading.Condition()
        self._checks: queue.SimpleQueue[Check | None] = queue.SimpleQueue()
        reliable.serve(_NAME, of_form(_ASK, self._answer))
        reliable.before_close(lambda: self._checks.put(None))
        reliable.runs(self._run, "tailbound-digests")

    def ask(self, check: Check) -> None:
        """Compares in the background; left out while an earlier one is waited for."""
        if self._checks.empty():
            self._checks.put(check)

    def _run(self) -> None:
        while (check := self._checks.get()) is not None:
            try:
                self._found(check, self.compare(check))
            except TransportError as error:
                log.debug("%s", error)
            except Exception:
                log.exception("rank %d: comparing digests", self._rank)

    def compare(self, check: Check) -> list[int] | None:
        """Compares a slice with a peer, and with all others where they differ.

        Returns:
            None if this rank is to take what the others hold; else the ranks of its lineage that hold something else.

        Raises:
            TransportError: the step is over, the peer does not answer, or this rank has missed a result meanwhile.
        """
        step, which, peer, patience = check
        with self._moment.reading(step, patience):
            lineage = self._lineage()
            if not lineage:  # asked before the step: a result of it was lost since, and that has its own remedy
                raise Refusal(f"a result was lost before the end of step {step}")
            # running statistics are every rank's own
            replica = self._replica
            own = replica.rates() + replica.layout(which) + replica.digest(which, buffers=False)
        with self._changed:
            self._kept[step, which] = lineage, own
            for old in list(self._kept)[:-_KEPT]:
                del self._kept[old]
            self._changed.notify_all()
        theirs, digest = self._ask(peer, step, which)
        if digest == own:
            return []
        if theirs != lineage:
            self._doubt([peer])
            return []
        held = {self._rank: own, peer: digest}
        for other in self._live():
            if other not in held:
                try:
                    theirs, digest = self._ask(other, step, which)
                except TransportError:  # not sound, or busy
                    continue
                if theirs == lineage:
                    held[other] = digest
        self.rates_unlike = len({one[:_RATES] for one in held.values()}) > 1
        if held[holds_most(held, step, self._ranks)] != own:
            return None
        return sorted(other for other in held if held[other] != own)

    def _ask(self, rank: int, step: int, which: int) -> tuple[int, bytes]:
        body = bytes(self._reliable.pull(rank, _NAME, _ASK.pack(step, which), _ANSWER, 1 << 10))
        if len(body) < _LINEAGE.size:
            raise TransportError(f"rank {rank} answers {len(body)} bytes for a digest: run one version on all ranks")
        return _LINEAGE.unpack_from(body)[0], body[_LINEAGE.size :]

    def _answer(self, step: int, which: int) -> list[bytes]:
        with self._changed:
            if not self._changed.wait_for(lambda: (step, which) in self._kept, _WAIT):
                raise Refusal("this rank compares nothing in that step")
            lineage, digest = self._kept[step, which]
        return [_LINEAGE.pack(lineage), digest]
