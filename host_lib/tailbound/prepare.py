"""Compile what numba has not compiled yet, once, before several processes would all do it at the same time.

Run as a process of its own (``python -m tailbound.prepare``): two ranks average small arrays over ``udp`` on
loopback, which takes every path of the codec and of the collective; the machine code stays in numba's cache on disk.
Where it is there already, that takes a few seconds.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from tailbound.errors import TailboundError, TransportError

#: Entries: a part of one row, some rows, several groups with a rest.
_SIZES = (10, 5_000, 200_000)
#: Seconds for an op at most, with all that is compiled for it: its thread may have died.
_LONGEST = 600.0


class MemoryStore:
    """A ``rendezvous.Store`` for threads of one process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str | bytes) -> None:
        """As in ``torch.distributed.Store``."""
        with self._changed:
            self.values[key] = value.encode() if isinstance(value, str) else value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        """Waits for it, a minute at most."""
        self.wait([key], timedelta(minutes=1))
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Until all are there; raises a ``TimeoutError``."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                raise TimeoutError(f"{keys} not set within {timeout}")


def compile_all() -> None:
    """Takes every path once."""
    # here, because the process that starts this one does not need numba
    import numpy as np

    from tailbound.collective.communicator import Communicator
    from tailbound.transport.config import Config

    store = MemoryStore()

    def rank(number: int) -> None:
        with Communicator(store, Config(rank=number, ranks=2, port=0, ring_mib=4), datapath="udp") as ours:
            for size in _SIZES:
                data = np.arange(number, number + size, dtype=np.float32)
                for _ in range(3):
                    if error := ours.allreduce(data, np.empty_like(data)).result(_LONGEST).error:
                        raise error
            ours.stats()
            ours.meet("over")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rank, range(2)))


class Preparation:
    """``compile_all`` in a process of its own, to be waited for: ``with Preparation() as p: ...; p.wait()``."""

    def __enter__(self) -> Preparation:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, process_group=0
        )
        return self

    def wait(self) -> None:
        """Waits for the end.

        Raises:
            TransportError: it failed; with its last words.
        """
        words = self._process.communicate()[1].decode(errors="replace").strip()
        if self._process.returncode != 0:
            raise TransportError(f"two ranks on loopback cannot average, see `tailbound doctor`: {words[-2000:]}")

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


if __name__ == "__main__":
    try:
        compile_all()
    except TailboundError as error:
        sys.exit(str(error))
