"""The loss scale as a function of the step, from a value that one rank wrote (clock-25 and clock-27).

An *epoch* is what a rank writes when its gradients overflow: a scale, and the step from which it holds. Of two epochs
the higher one wins, on every rank. Within an epoch the scale grows by itself after so many steps, by the number of the
step alone, so that ranks of the same epoch have the same scale without a word.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tailbound.errors import TransportError
from tailbound.transport.steps import STEP_MASK, step_distance

_FORM = struct.Struct("!IId")
_DOUBLE, _BITS = struct.Struct("=d"), struct.Struct("=q")
_FLOAT32_MOST = 3.4028234663852886e38


class Epoch(NamedTuple):
    """What one rank wrote: ``scale`` holds from step ``begun``; ``number`` epochs were before."""

    number: int
    begun: int
    scale: float

    def beats(self, other: Epoch) -> bool:
        """Whether this one wins: the higher number, else the later step, else the smaller scale."""
        if self.number != other.number:
            return self.number > other.number
        apart = step_distance(self.begun, other.begun)
        return apart > 0 or (apart == 0 and self.scale < other.scale)

    def pack(self) -> bytes:
        """16 bytes, network byte order."""
        return _FORM.pack(*self)

    def words(self) -> list[int]:
        """Three integers of 64 bits."""
        return [self.number, self.begun, *_BITS.unpack(_DOUBLE.pack(self.scale))]

    @classmethod
    def of_words(cls, number: int, begun: int, scale: int) -> Epoch:
        """The other way."""
        return cls(number, begun, *_DOUBLE.unpack(_BITS.pack(scale)))

    @classmethod
    def unpack(cls, data: bytes) -> Epoch:
        """The other way.

        Raises:
            TransportError: that is no epoch.
        """
        try:
            epoch = cls(*_FORM.unpack(data))
        except struct.error as error:
            raise TransportError(f"a loss scale of {len(data)} bytes: install one version everywhere") from error
        if not 0 < epoch.scale <= _FLOAT32_MOST:
            raise TransportError(f"a loss scale of {epoch.scale}: give all ranks a scale that float32 can hold")
        return epoch


class LossScale:
    """The scale of the present epoch.

    ``growth``, ``backoff`` and ``interval`` are those of ``torch.amp.GradScaler``, equal on all ranks.

    Args:
        scale: that of the first epoch.
        step: from which it holds.
    """

    _epoch: Epoch
    _scale: float
    _since: int

    def __init__(self, scale: float, step: int) -> None:
        self._take(Epoch(0, step & STEP_MASK, float(scale)))

    @property
    def epoch(self) -> Epoch:
        """The present one."""
        return self._epoch

    def at(self, step: int, growth: float, interval: int) -> float:
        """The scale for ``step``, which is not before one asked for earlier.

        As in torch, a scale that float32 cannot hold is not taken.
        """
        while step_distance(step, self._since) >= interval:  # moves on with the steps, so that these may wrap
            self._since = (self._since + interval) & STEP_MASK
            if self._scale * growth <= _FLOAT32_MOST:
                self._scale *= growth
        return self._scale

    @property
    def told(self) -> tuple[int, int, float, float, int]:
        """All of it, for a rank that has come back (``take_over``)."""
        return (*self._epoch, self._scale, self._since)

    def take_over(self, told: tuple[int, int, float, float, int]) -> None:
        """Goes on from what another rank has ``told``."""
        number, begun, scale, self._scale, self._since = told
        self._epoch = Epoch(number, begun, scale)

    def clean(self, step: int) -> int:
        """Steps before ``step`` that the scale has held since it grew last: torch's growth tracker."""
        return max(0, step_distance(step, self._since))

    def hear(self, epoch: Epoch) -> bool:
        """Takes an epoch of another rank if it wins; returns whether it did."""
        won = epoch.beats(self._epoch)
        if won:
            self._take(epoch)
        return won

    def write(self, scale: float, step: int, clean: int = 0) -> Epoch:
        """Begins an epoch in which ``scale`` holds from ``step``, after ``clean`` steps that it held before."""
        epoch = Epoch(self._epoch.number + 1, (step - clean) & STEP_MASK, float(scale))
        self._take(epoch)
        return epoch

    def _take(self, epoch: Epoch) -> None:
        self._epoch, self._scale, self._since = epoch, epoch.scale, epoch.begun
