"""Processor time of an op: whose turn it is pays for what the ranks' threads do, and for the kernel's share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tailbound_lab.bench.softirq import KernelShare


class Meter:
    """Charges one rank's processor time to whose turn it is.

    Of the calling thread only what it does within ``op`` counts. Other threads' time counts from one ``turn`` to the
    next, since a rank goes on answering others when it has its own result.

    Args:
        kernel: whether to read the kernel's share as well: one rank does, it is the machine's.
    """

    def __init__(self, *, kernel: bool) -> None:
        self._kernel: KernelShare | None = None
        if kernel:
            with contextlib.suppress(OSError):
                self._kernel = KernelShare()
        self._known = not kernel or self._kernel is not None
        self._at = self._now()
        self.forget()

    def forget(self) -> None:
        """Begins anew; nobody has a turn."""
        self._name: str | None = None
        self._spent: dict[str, tuple[float, float, int]] = {}

    def turn(self, name: str | None = None) -> None:
        """From here on it is the turn of ``name`` (None: of nobody)."""
        others, kernel = self._now()
        if self._name is not None:
            self._add(self._name, others - self._at[0], kernel - self._at[1], 0)
        self._name, self._at = name, (others, kernel)

    @contextlib.contextmanager
    def op(self) -> Iterator[None]:
        """The calling thread works on an op of whose turn it is."""
        begin = time.thread_time()
        yield
        if self._name is not None:
            self._add(self._name, time.thread_time() - begin, 0.0, 1)

    def report(self) -> list[list[Any]]:
        """[name, seconds of this process, the kernel's share in seconds (None: not known), ops] of each."""
        return [[name, own, kernel if self._known else None, ops] for name, (own, kernel, ops) in self._spent.items()]

    def _now(self) -> tuple[float, float]:
        others = time.process_time() - time.thread_time()
        return others, self._kernel.seconds() if self._kernel is not None else 0.0

    def _add(self, name: str, own: float, kernel: float, ops: int) -> None:
        before = self._spent.get(name, (0.0, 0.0, 0))
        self._spent[name] = before[0] + own, before[1] + kernel, before[2] + ops


def per_op(entries: Iterable[Sequence[Any]], name: str) -> dict[str, float | None]:
    """``cpu_ms``, processor time of an op and rank, and ``kernel_ms``, what of it is in no rank's time.

    Both are None where no op of ``name`` was metered; ``kernel_ms`` alone where the kernel does not say.

    Args:
        entries: of ``Meter.report``, of all ranks, any number of reports.
        name: whose.
    """
    found = [entry for entry in entries if entry[0] == name]
    ops = sum(entry[3] for entry in found)
    if not ops:
        return {"cpu_ms": None, "kernel_ms": None}
    own, shares = sum(entry[1] for entry in found), [entry[2] for entry in found]
    unknown = None in shares
    kernel = 0.0 if unknown else max(0.0, sum(shares))  # read in hundredths of a second: nothing may come out as less
    return {"cpu_ms": 1e3 * (own + kernel) / ops, "kernel_ms": None if unknown else 1e3 * kernel / ops}
