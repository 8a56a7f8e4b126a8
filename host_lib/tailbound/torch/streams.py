"""In which order a device works on a bucket, and memory of the host that it copies codes to and from.

The training thread says where a gradient is ready (``mark``), the transport thread works behind that mark in a stream
of its own (``use``), and the future is completed within the stream that wrote the average (``future``): torch then lets
whoever waits for it wait for that stream, on the device, while the host goes on.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

#: Its streams and events carry no types.
_cuda: Any = torch.cuda
#: The device of each thread that has been given one.
_thread = threading.local()


def settle_thread(device: torch.device) -> None:
    """Makes ``device`` that of the calling thread, if Tailbound has started it and it has none yet.

    A new thread is on device 0, whatever its process trains on: on a host of several ranks all of them would make a
    context there, which takes hundreds of MB each.
    """
    if threading.current_thread().name.startswith("tailbound") and not hasattr(_thread, "device"):
        _cuda.set_device(device)
        _thread.device = device


class Stream:
    """A queue of work on ``device`` beside the one that the training thread fills.

    This one is of the host: everything is done when the call that does it returns.

    Attributes:
        backend: of groups that carry memory of the device.
        one_order: collectives of a step may not overtake each other, in whatever direction.
    """

    backend, one_order = "gloo", False

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")

    def mark(self) -> Any:
        """All that the calling thread has queued on the device so far; for ``use``."""
        return

    def use(self, mark: Any = None) -> AbstractContextManager[Any]:
        """Within the context, work goes to this stream, on this device, behind ``mark`` if there is one."""
        return nullcontext()

    def event(self) -> Any:
        """All that this stream has been given so far: ``query()`` says whether it is done, ``synchronize()`` waits."""
        return SimpleNamespace(query=lambda: True, synchronize=lambda: None)

    def host_memory(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host that the device copies to and from by itself; within ``use`` only.

        torch gives it to the next caller once it is dropped here and the device is through with it.
        """
        return torch.empty(shape, dtype=dtype)

    def join(self) -> None:
        """What the calling thread queues from now on comes after all that this stream has been given so far."""

    def future(self) -> torch.futures.Future[torch.Tensor]:
        """A future for a tensor on the device, to be completed within ``use``."""
        return torch.futures.Future()


class CudaStream(Stream):
    """A side stream of high priority: its short kernels go in between those of the backward pass."""

    backend, one_order = "nccl", True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = _cuda.Stream(device, priority=-1)

    def mark(self) -> Any:
        """All that is queued on the calling thread's current stream of the device."""
        event = _cuda.Event()
        event.record(_cuda.current_stream(self.device))
        return event

    def use(self, mark: Any = None) -> AbstractContextManager[Any]:
        """Makes the side stream and its device current; of a thread of Tailbound the device for good."""
        settle_thread(self.device)
        if mark is not None:
            self._stream.wait_event(mark)
        context: AbstractContextManager[Any] = _cuda.stream(self._stream)
        return context

    def event(self) -> Any:
        """An event that is polled; who waits for it all the same, at the end of a process say, sleeps."""
        event = _cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def host_memory(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Page-locked; outside of ``use`` a context on another device might be made for it."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def join(self) -> None:
        """The calling thread's current stream of the device waits."""
        _cuda.current_stream(self.device).wait_stream(self._stream)

    def future(self) -> torch.futures.Future[torch.Tensor]:
        """A future that knows the device, or it would refuse a tensor there."""
        return torch.futures.Future(devices=[self.device])


def stream_of(device: torch.device) -> Stream:
    """A stream of ``device``."""
    return CudaStream(device) if device.type == "cuda" else Stream(device)
