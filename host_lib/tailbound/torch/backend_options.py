"""What a group of the backend ``tailbound`` is asked for, as ``pg_options``."""

from __future__ import annotations

from typing import Unpack

from tailbound.settings.table import Options, refuse_unknown


class BackendOptions:
    """Options of a process group of the backend ``tailbound``.

    Args:
        bounded: average floating-point all-reduces of this group in bounded time, except within ``exact()``. Otherwise
            only within ``bounded()``.
        **transport: options of ``TailboundState``, for the group's own job: ``interface``, ``deadline_ms``, ... Those
            about a model's replica have no effect.

    Raises:
        ConfigError: an option that is none.
    """

    def __init__(self, *, bounded: bool = False, **transport: Unpack[Options]) -> None:
        refuse_unknown(transport)
        self.bounded, self.transport = bool(bounded), {**transport}

    def __repr__(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self.transport.items())
        return f"BackendOptions(bounded={self.bounded}{given})"
