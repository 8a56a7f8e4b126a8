"""Handle of a bounded all-reduce: ``dist.Work`` over one or more averages of the transport."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tailbound.errors import TransportError

_FOREVER = timedelta(0)


class BoundedWork(dist.Work):
    """Completes once all of ``tensors`` have been averaged in place.

    It is completed by the transport thread. The future is never given an exception: one from a Python process group
    ends the process with a segmentation fault (PyTorch 2.13). It completes with the tensors, and the error comes from
    ``wait`` or from the future that ``get_future`` returns.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._left = len(tensors)
        self._errors: list[BaseException] = []
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._checked = self._done.then(self._check)

    def one_done(self, error: BaseException | None = None) -> None:
        """One of the tensors is over; to be called as many times as there are tensors."""
        with self._lock:
            if error is not None:
                self._errors.append(error)
            self._left -= 1
            if self._left:
                return
        self._over.set()
        self._done.set_result(self._tensors)

    def _check(self, done: torch.futures.Future[list[torch.Tensor]]) -> list[torch.Tensor]:
        if self._errors:
            raise self._errors[0]
        return done.value()

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Waits until the averages are there; ``timeout`` bounds the caller only, the op has a bound of its own.

        Raises:
            TailboundError: why the averages cannot be used.
            TransportError: ``timeout`` was shorter.
        """
        if not self._over.wait(timeout.total_seconds() if timeout > _FOREVER else None):
            raise TransportError(
                f"this bounded all-reduce is not over after {timeout.total_seconds():g} s: give wait a longer timeout"
            )
        if self._errors:
            raise self._errors[0]
        return True

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._over.is_set()

    def is_success(self) -> bool:
        """Whether it is over, without an error."""
        return self._over.is_set() and not self._errors

    def exception(self) -> Any:
        """The error, if it ended with one."""
        return self._errors[0] if self._over.is_set() and self._errors else None

    def result(self) -> list[torch.Tensor]:
        """The tensors, averaged."""
        self.wait()
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Completes with the tensors; raises in ``wait`` and ``value`` if they cannot be used."""
        return self._checked
