"""What a worker process and the process that started it say to each other: lines of JSON over two pipes."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from tailbound.errors import TailboundError
from tailbound_lab.bench.places import PARENT
from tailbound_lab.lab.enter import die_with

#: Number of the pipe on which a worker reports.
REPORT_FD = "TAILBOUND_BENCH_REPORT"


class Channel:
    """A worker's end. Reports go out at once, orders come in on standard input."""

    def __init__(self) -> None:
        self._out = os.fdopen(int(os.environ[REPORT_FD]), "w", buffering=1)

    def report(self, kind: str, **values: Any) -> None:
        """Sends one message; values of plain types."""
        self._out.write(json.dumps({"kind": kind, **values}) + "\n")

    def order(self) -> str:
        """Waits for the next order; empty when the other side has gone."""
        return sys.stdin.readline().strip()


def serve(function: Callable[[dict[str, Any], Channel], None]) -> int:
    """Runs ``function(job, channel)`` with the job in ``sys.argv[1]``; errors are reported, not only printed.

    Returns:
        Exit status.
    """
    if parent := os.environ.get(PARENT):
        die_with(int(parent))
    channel = Channel()
    try:
        function(json.loads(sys.argv[1]), channel)
    except Exception as error:
        if not isinstance(error, TailboundError):
            traceback.print_exc()
        channel.report("error", text=f"{type(error).__name__}: {error}", at=time.monotonic_ns())
        return 1
    return 0
