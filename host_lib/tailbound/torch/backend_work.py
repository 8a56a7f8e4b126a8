"""A bounded all-reduce: how a tensor goes through the transport, and its handle, a ``dist.Work``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tailbound.collective.communicator import Communicator, Handling
from tailbound.collective.op import Outcome
from tailbound.errors import TransportError
from tailbound.torch.paths import BucketPath

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

    def of(self, note: Callable[[Outcome], None]) -> Callable[[Outcome, BaseException | None], None]:
        """To be called when one of the tensors is over, once for each; ``note`` takes in what became of it."""

        def done(outcome: Outcome, error: BaseException | None) -> None:
            try:
                note(outcome)
            finally:
                with self._lock:
                    if error is not None:
                        self._errors.append(error)
                    self._left -= 1
                    over = not self._left
                if over:
                    self._over.set()
                    self._done.set_result(self._tensors)

        return done

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

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._over.is_set()

    def is_success(self) -> bool:
        """Whether it is over, without an error."""
        return self._over.is_set() and not self._errors

    def exception(self) -> Any:
        """The error, if it ended with one."""
        return self._errors[0] if self._over.is_set() and self._errors else None

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Completes with the tensors; raises in ``wait`` and ``value`` if they cannot be used."""
        return self._checked


def launch(
    communicator: Communicator,
    tensor: torch.Tensor,
    bucket: int,
    last: bool,
    factor: int,
    done: Callable[[Outcome, BaseException | None], None],
) -> None:
    """Averages ``tensor`` into itself, times ``factor``, where the codec reads and writes its type.

    Others go through float32 memory; so do halves with a factor that is no power of two, which would be rounded twice.
    """
    mine, path = tensor.detach(), BucketPath()
    native = mine.dtype == torch.float32 or (mine.dtype in path.native and factor.bit_count() == 1)
    direct = native and mine.is_contiguous()
    flat = mine.view(-1) if direct else torch.empty(mine.numel(), dtype=torch.float32)
    # torch lets such tensors be written within that mode only, and the transport's thread is not in it by itself
    inference = mine.is_inference() or flat.is_inference()

    def read() -> None:
        with torch.inference_mode(inference):
            flat.view(mine.shape).copy_(mine)

    def back(outcome: Outcome) -> None:
        error: BaseException | None = outcome.error
        try:
            with torch.inference_mode(inference):
                if factor != 1 and not native:
                    flat.mul_(factor)
                if not direct:
                    mine.copy_(flat.view(mine.shape))
                if factor != 1 and native:  # after rounding on all ranks, however their tensors lie: bits are the same
                    mine.mul_(factor)
        except Exception as caught:  # a work that never completes would hang its caller
            error = error or caught
        done(outcome, error)

    communicator.launch(
        bucket,
        path.values(flat),
        path.values(flat),
        last=last,
        done=back,
        prepare=None if direct else read,
        handling=Handling(str(tensor.dtype).removeprefix("torch.")),
    )
