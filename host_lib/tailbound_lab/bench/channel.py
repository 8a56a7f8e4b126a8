"""The words between a worker process and the process that started it."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tailbound.errors import TailboundError

#: Tailbound; the two that average over TCP: Gloo, and our codes.
OURS, GLOO, QUANTISED = "tailbound", "gloo", "quantised"
#: Variable with the number of a worker's end of the connection.
END_FD = "TAILBOUND_BENCH_END"
#: The last order.
END = "end"


def order_of(names: Sequence[str], round_number: int) -> list[str]:
    """Return who is measured in a round, in which order: it alternates."""
    return list(names) if round_number % 2 == 0 else list(names)[::-1]


class Channel:
    """A worker's end."""

    def __init__(self) -> None:
        self._end = Connection(int(os.environ[END_FD]))

    def report(self, kind: str, **values: Any) -> None:
        """Send one message; values of plain types."""
        self._end.send({"kind": kind, **values})

    def obey(self, phase: Callable[..., dict[str, Any]]) -> None:
        """Do phase after phase with the arguments that are ordered, and report each, until the order ``END``."""
        try:
            while (order := self._end.recv()) != END:
                self.report("phase", **phase(**order))
        except EOFError:
            return  # the other side has gone


def serve(work: Callable[[dict[str, Any], Channel], None]) -> int:
    """Run ``work(job, channel)`` with the job in ``sys.argv[1]``; errors are reported, not only printed.

    Returns:
        Exit status.
    """
    channel = Channel()
    try:
        work(json.loads(sys.argv[1]), channel)
    except Exception as error:
        if not isinstance(error, TailboundError):
            traceback.print_exc()
        channel.report("error", text=f"{type(error).__name__}: {error}", at=time.monotonic_ns())
        return 1
    return 0
