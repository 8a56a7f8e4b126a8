"""When averages are applied: each in its own step, or in the next one, while those of that step are on the wire.

The latter is Pipe-SGD (Li et al., NeurIPS 2018) with a pipeline of two: step k applies the average of the gradients of
step k - 1. So communication has a whole step to hide in, and not only the rest of one backward pass. The price is a
gradient that is one step old, more memory, and one step that changes nothing where the pipeline begins.

The first steps are not delayed: DDP builds its buckets anew after the first or second, and an average of other buckets
is not one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tailbound.collective.op import Outcome
from tailbound.errors import ConfigError

SCHEDULES = ("synchronous", "delayed")
#: Steps whose averages are applied at once: as many as DDP may take to settle on its buckets, and one to be sure.
SETTLING = 3


@dataclass
class Pending:
    """The average of one bucket, on its way or there.

    ``tensor`` is the bucket's gradient (its memory may be another's by now: only size and type count), ``last``: it
    ends the step, ``future``: done once the average is there, ``outcome``: what became of it, then, ``scale``: the loss
    scale that it has.
    """

    index: int
    tensor: torch.Tensor
    last: bool
    future: torch.futures.Future[torch.Tensor]
    outcome: Outcome
    scale: float = 1.0

    def like(self, other: Pending) -> bool:
        """Whether both are of the same bucket of a step."""
        mine, theirs = self.tensor, other.tensor
        return (mine.numel(), mine.dtype, self.last) == (theirs.numel(), theirs.dtype, other.last)


def ready(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future that is done."""
    future: torch.futures.Future[torch.Tensor]
    future = torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else None)
    future.set_result(tensor)
    return future


class Schedule:
    """What the hook does with an average that is on its way; one bucket at a time, in the order of the hook's calls.

    Args:
        kind: ``synchronous`` or ``delayed``: each average is exchanged for that of the step before.
        applied: told of what has become of an average when it is handed out to be applied, and whether it is the last
            of its step; where averages are applied at once, whoever finishes them says so.
        scale: says the loss scale that an average handed out now should have.

    Raises:
        ConfigError: ``kind`` is something else.
    """

    def __init__(
        self, kind: str, applied: Callable[[Outcome, bool], None], scale: Callable[[], float] = lambda: 1.0
    ) -> None:
        if kind not in SCHEDULES:
            raise ConfigError(f"schedule={kind!r}: give one of {', '.join(SCHEDULES)}")
        self.kind, self._applied, self._scale = kind, applied, scale
        #: averages are applied in their own step, all together
        self.at_once = kind == "synchronous"
        self._waiting: dict[int, Pending] = {}
        self._step = 0
        #: buckets that had no average to apply: where a pipeline began
        self._bubbles = 0

    @property
    def turn(self) -> int:
        """Which of two sets of memory the present step uses: the other one holds what is still to be applied."""
        return self._step & 1

    @property
    def waits(self) -> bool:
        """Whether an average is still to be applied."""
        return bool(self._waiting)

    def put_off(self, new: Pending) -> torch.futures.Future[torch.Tensor]:
        """What is to be applied now that ``new`` is on its way: ``new`` itself while DDP settles, zeros for nothing."""
        if self.at_once:
            return new.future
        settling = self._step < SETTLING
        self._step += new.last
        old: Pending | None = new
        if not settling:
            old = self._waiting.pop(new.index, None)
            self._waiting[new.index] = new
        if old is None or not old.like(new):
            self._bubbles += 1
            return ready(torch.zeros_like(new.tensor))
        return self._hand_out(old)

    def exchange(
        self, averages: Sequence[torch.Tensor], outcomes: Sequence[Outcome], scale: float
    ) -> Sequence[torch.Tensor]:
        """What a step that ended with ``averages`` (by bucket, with ``scale``) applies: these, or those before."""
        ended = [index == len(averages) - 1 for index in range(len(averages))]
        if self.at_once:
            for outcome, last in zip(outcomes, ended, strict=True):
                self._applied(outcome, last)
            return averages
        futures = [
            self.put_off(Pending(index, average, ended[index], ready(average), outcome, scale))
            for index, (average, outcome) in enumerate(zip(averages, outcomes, strict=True))
        ]
        return [future.wait() for future in futures]

    def take(self) -> list[torch.Tensor]:
        """Waits for the averages that are still to be applied, and hands them out by bucket; nothing is after this."""
        waiting = [self._waiting[index] for index in sorted(self._waiting)]
        self._waiting.clear()
        return [future.wait() for future in map(self._hand_out, waiting)]

    def forget(self) -> None:
        """Drops what was to be applied: the parameters are others now."""
        self._waiting.clear()

    def stats(self) -> dict[str, Any]:
        """Counts, in plain types."""
        return {} if self.at_once else {"bubbles": self._bubbles}

    def _hand_out(self, old: Pending) -> torch.futures.Future[torch.Tensor]:
        factor = self._scale() / old.scale

        def apply(completed: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            value = completed.value()
            if factor != 1.0:
                value.mul_(factor)
            self._applied(old.outcome, old.last)
            return value

        return old.future.then(apply)
