"""What the processes of the tests of processes do."""

from __future__ import annotations

import os
import signal
import threading


def failing(rank: int, how: str) -> None:
    """Rank 1 does not end well, rank 0 not at all."""
    if rank == 0:
        threading.Event().wait()
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    raise KeyError(how)
