"""Signals and a thing that must be taken down whatever happens."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

#: They end a process without a word to Python; SIGINT is a KeyboardInterrupt already.
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class ExitOnSignal:
    """From ``install`` to ``restore`` SIGTERM and SIGHUP raise SystemExit(128 + number), so ``finally`` blocks run.

    Once: ``timeout`` sends SIGTERM twice, and the second one would break off what the first one has begun. Handlers
    that somebody else has set are left alone. Nothing happens outside the main thread, where Python takes no signals.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Take over the signals that still have their default effect."""
        if threading.current_thread() is not threading.main_thread():
            return

        def leave(number: int, frame: FrameType | None) -> None:
            for each in self._before:
                signal.signal(each, lambda *_: None)
            raise SystemExit(128 + number)

        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                self._before[number] = signal.signal(number, leave)

    def restore(self) -> None:
        """Give back what was taken over."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before.clear()


@contextlib.contextmanager
def held() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP take effect when the block is left.

    By handlers, not by the signal mask: the kernel would hand a masked signal to another thread, and Python runs its
    handler in the main thread all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python interrupts the main thread only
        return
    came: list[int] = []
    before = {}
    for number in (signal.SIGINT, *_SIGNALS):
        if signal.getsignal(number) not in (None, signal.SIG_IGN):
            before[number] = signal.signal(number, lambda n, frame: came.append(n))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in dict.fromkeys(came):
            signal.raise_signal(late)
