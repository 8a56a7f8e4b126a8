"""Things that are dear to make and cheap to begin anew: tests take them in turn, one test at a time each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Kept:
    """Things that were made, by how they were made; all of it is closed at the end."""

    def __init__(self) -> None:
        self._made: list[Any] = []
        self._idle: dict[Any, list[Any]] = {}
        self._lent: list[tuple[Any, Any]] = []

    def take(self, make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """``make(*arguments, **options)``, or what that returned before and nobody has now; it is as it was left."""
        key = (make, arguments, tuple(sorted(options.items())))
        idle = self._idle.setdefault(key, [])
        if not idle:
            idle.append(make(*arguments, **options))
            self._made.append(idle[-1])
        self._lent.append((key, idle.pop()))
        return self._lent[-1][1]

    def give_back(self) -> None:
        """Everything that has been taken."""
        for key, one in self._lent:
            self._idle[key].append(one)
        self._lent.clear()

    def close(self) -> None:
        """Closes all that was made."""
        for one in self._made:
            one.close()
