"""The words between a worker process and the process that started it: lines of JSON over two pipes."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from tailbound.errors import TailboundError

#: Tailbound, also with stamps around the parts of an op; the two that average over TCP: Gloo, and our codes.
OURS, STAMPED, GLOO, QUANTISED = "tailbound", "stamped", "gloo", "quantised"
#: Number of the pipe on which a worker reports.
REPORT_FD = "TAILBOUND_BENCH_REPORT"


def order_of(names: Sequence[str], round_number: int) -> list[str]:
    """Return who is measured in a round, in which order: it alternates."""
    return list(names) if round_number % 2 == 0 else list(names)[::-1]


class Channel:
    """A worker's end. Reports go out at once, orders come in on standard input."""

    def __init__(self) -> None:
        self._out = os.fdopen(int(os.environ[REPORT_FD]), "w", buffering=1)

    def report(self, kind: str, **values: Any) -> None:
        """Send one message; values of plain types."""
        self._out.write(json.dumps({"kind": kind, **values}) + "\n")

    def order(self) -> str:
        """Wait for the next order; empty when the other side has gone."""
        return sys.stdin.readline().strip()

    def obey(self, phase: Callable[..., dict[str, Any]]) -> None:
        """Do phase after phase with the arguments that are ordered, and report each, until the order ``end``."""
        while (order := self.order()) and order != "end":
            self.report("phase", **phase(**json.loads(order)))


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
