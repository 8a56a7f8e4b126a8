"""Things that are dear to make and cheap to begin anew: tests take them in turn, one test at a time each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Idle things that are kept; each of a kernel test holds up to 30 files open, and select(2) knows 1,024.
_IDLE = 12


class Kept:
    """Things that were made, by how they were made; those that lay idle for longest are closed first."""

    def __init__(self) -> None:
        self._idle: list[tuple[Any, Any]] = []
        self._lent: list[tuple[Any, Any]] = []

    def take(self, make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """``make(*arguments, **options)``, or what that returned before and nobody has now; it is as it was left."""
        key = (make, arguments, tuple(sorted(options.items())))
        at = next((at for at, (made, _) in enumerate(self._idle) if made == key), None)
        self._lent.append(self._idle.pop(at) if at is not None else (key, make(*arguments, **options)))
        return self._lent[-1][1]

    def give_back(self) -> None:
        """Everything that has been taken."""
        self._idle += self._lent
        self._lent.clear()
        self._close(len(self._idle) - _IDLE)

    def close(self) -> None:
        """Closes all that was made."""
        self.give_back()
        self._close(len(self._idle))

    def _close(self, most: int) -> None:
        for _ in range(most):
            self._idle.pop(0)[1].close()
