"""How long an answer is waited for before the question counts as lost: learned from how long answers take."""

from __future__ import annotations


class Patience:
    """Twice what answers usually take, within bounds.

    Args:
        least, most: ns.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._usual = 0.0

    @property
    def value(self) -> int:
        """ns; until an answer has come, the least."""
        return min(self._most, max(self._least, int(2 * self._usual)))

    def observe(self, took: int) -> None:
        """An answer came ``took`` ns after it was asked for."""
        self._usual += (took - self._usual) / 8
