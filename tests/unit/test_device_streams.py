"""What ``CudaStream`` asks of ``torch.cuda``, and in which order; a recorder stands in for it where there is no GPU."""

from __future__ import annotations

from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest

pytestmark = pytest.mark.needs("torch")


class Recorder:
    """Streams and events that note what is done with them; ``current`` is the calling thread's stream."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current = _Stream(self, "main")

    def Stream(self, device: Any, priority: int) -> _Stream:
        self.calls.append(f"side stream on {device}, priority {priority}")
        return _Stream(self, "side")

    def Event(self, blocking: bool = False) -> _Event:
        return _Event(self, "sleeping event" if blocking else "event")

    def set_device(self, device: Any) -> None:
        self.calls.append(f"this thread is on {device}")

    def current_stream(self, device: Any) -> _Stream:
        return self.current

    @contextmanager
    def stream(self, stream: _Stream) -> Any:
        before, self.current = self.current, stream
        yield
        self.current = before


class _Stream:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self.name = recorder, name

    def wait_event(self, event: _Event) -> None:
        self._recorder.calls.append(f"{self.name} waits for {event.name}")

    def wait_stream(self, other: _Stream) -> None:
        self._recorder.calls.append(f"{self.name} waits for {other.name}")


class _Event:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self.name = recorder, name

    def record(self, stream: _Stream) -> None:
        self.name = f"{self.name} of {stream.name}"
        self._recorder.calls.append(f"record {self.name}")


def test_the_side_stream_works_behind_the_mark_and_others_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from tailbound.torch import streams

    recorder = Recorder()
    monkeypatch.setattr(streams, "_cuda", recorder)
    stream = streams.CudaStream(torch.device("cuda:0"))
    mark = stream.mark()
    with stream.use(mark):
        assert recorder.current.name == "side"
        stream.event()
    assert recorder.current.name == "main"
    with stream.use():
        pass
    stream.join()
    assert recorder.calls == [
        "side stream on cuda:0, priority -1",
        "record event of main",
        "side waits for event of main",
        "record sleeping event of side",
        "main waits for side",
    ]


def test_a_thread_of_tailbound_is_on_the_device_it_works_on_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it makes a context on device 0. Threads of others stay where they are."""
    import torch

    from tailbound.torch import streams

    recorder = Recorder()
    monkeypatch.setattr(streams, "_cuda", recorder)
    two, three = (streams.CudaStream(torch.device("cuda", index)) for index in (2, 3))
    recorder.calls.clear()

    def work() -> None:
        for stream in (two, two, three):
            with stream.use():
                pass
        streams.settle_thread(torch.device("cuda:3"))

    for name in ("tailbound", "tailbound-resync", "training"):
        thread = Thread(target=work, name=name)
        thread.start()
        thread.join()
    work()
    assert recorder.calls == ["this thread is on cuda:2"] * 2


def test_every_cuda_device_has_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from tailbound.torch import streams
    from tailbound.torch.device_coder import DeviceCoder
    from tailbound.torch.paths import Paths

    recorder = Recorder()
    monkeypatch.setattr(streams, "_cuda", recorder)
    paths = Paths()
    first, second = (paths.of(torch.device("cuda", index)) for index in range(2))
    assert first is not second
    assert first is paths.of(torch.device("cuda:0"))
    assert first.stream.device == torch.device("cuda:0")
    assert first.native
    assert isinstance(first.coder(first.stream.mark()), DeviceCoder)
    assert len([call for call in recorder.calls if call.startswith("side stream")]) == 2
