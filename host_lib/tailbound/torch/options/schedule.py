"""When averages are applied: each in its own step, or in the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tailbound.collective.op import Outcome
from tailbound.errors import ConfigError
from tailbound.torch.options.delayed import Delay, Pending, ready

SCHEDULES = ("synchronous", "delayed")


class Schedule:
    """What the hook does with an average that is on its way.

    Args:
        kind: one of ``SCHEDULES``.
        applied: told of what has become of an average when it is applied, and whether it is the last of its step;
            where averages are applied at once, whoever finishes them says so.
        scale: says the loss scale that gradients have now.

    Raises:
        ConfigError: ``kind`` is something else.
    """

    def __init__(self, kind: str, applied: Callable[[Outcome, bool], None], scale: Callable[[], float]) -> None:
        if kind not in SCHEDULES:
            raise ConfigError(f"schedule={kind!r}: give one of {', '.join(SCHEDULES)}")
        self.kind, self._applied = kind, applied
        self._delay = Delay(applied, scale) if kind == "delayed" else None

    @property
    def at_once(self) -> bool:
        """Averages are applied in their own step, all together."""
        return self._delay is None

    @property
    def turn(self) -> int:
        """Which of two sets of memory the present step uses."""
        return self._delay.parity if self._delay is not None else 0

    def put_off(self, new: Pending) -> torch.futures.Future[torch.Tensor]:
        """What the hook returns now that ``new`` is on its way."""
        return new.future if self._delay is None else self._delay.exchange(new)

    def exchange(
        self, averages: Sequence[torch.Tensor], outcomes: Sequence[Outcome], scale: float
    ) -> Sequence[torch.Tensor]:
        """What a step that ended with ``averages`` (by bucket, with ``scale``) applies: these, or those before."""
        last = len(averages) - 1
        if self._delay is None:
            for index, outcome in enumerate(outcomes):
                self._applied(outcome, index == last)
            return averages
        futures = [
            self._delay.exchange(Pending(index, average, index == last, ready(average), outcome, scale))
            for index, (average, outcome) in enumerate(zip(averages, outcomes, strict=True))
        ]
        return [future.wait() for future in futures]

    @property
    def waits(self) -> bool:
        """Whether a delayed average is still to be applied."""
        return self._delay is not None and self._delay.waits

    def take(self) -> list[torch.Tensor]:
        """Waits for the delayed averages that are still to be applied, and hands them out, by bucket."""
        return [future.wait() for future in self._delay.take()] if self._delay is not None else []

    def forget(self) -> None:
        """Drops what was to be applied: the parameters are others now."""
        if self._delay is not None:
            self._delay.forget()

    def stats(self) -> dict[str, Any]:
        """Counts, in plain types."""
        return {"bubbles": self._delay.bubbles} if self._delay is not None else {}
