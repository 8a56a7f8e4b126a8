"""What ``CudaStream`` asks of ``torch.cuda``; a mock stands in for it where there is no GPU."""

from __future__ import annotations

from threading import Thread
from unittest import mock

import pytest

pytestmark = pytest.mark.needs("torch")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> mock.MagicMock:
    from tailbound.torch import streams

    monkeypatch.setattr(streams, "_cuda", found := mock.MagicMock())
    found.Event.side_effect = lambda **_: mock.MagicMock()
    return found


def test_the_side_stream_works_behind_the_mark_and_others_behind_it(cuda: mock.MagicMock) -> None:
    import torch

    from tailbound.torch.streams import CudaStream

    device = torch.device("cuda:0")
    stream, side, main = CudaStream(device), cuda.Stream.return_value, cuda.current_stream.return_value
    cuda.Stream.assert_called_once_with(device, priority=-1)
    mark = stream.mark()
    mark.record.assert_called_once_with(main)
    with stream.use(mark):
        pass
    side.wait_event.assert_called_once_with(mark)
    cuda.stream.assert_called_once_with(side)
    with stream.use():
        pass
    side.wait_event.assert_called_once()
    stream.event().record.assert_called_once_with(side)
    assert cuda.Event.call_args == mock.call(blocking=True)
    stream.join()
    main.wait_stream.assert_called_once_with(side)


def test_a_thread_of_tailbound_is_on_the_device_it_works_on_first(cuda: mock.MagicMock) -> None:
    """Else it makes a context on device 0. Threads of others stay where they are."""
    import torch

    from tailbound.torch.streams import CudaStream, settle_thread

    two, three = (CudaStream(torch.device("cuda", index)) for index in (2, 3))

    def work() -> None:
        for stream in (two, two, three):
            with stream.use():
                pass
        settle_thread(torch.device("cuda:3"))

    for name in ("tailbound", "tailbound-resync", "training"):
        thread = Thread(target=work, name=name)
        thread.start()
        thread.join()
    work()
    assert cuda.set_device.call_args_list == [mock.call(torch.device("cuda:2"))] * 2


def test_every_cuda_device_has_a_stream_of_its_own(cuda: mock.MagicMock) -> None:
    import torch

    from tailbound.torch.device_coder import DeviceCoder
    from tailbound.torch.paths import Paths

    paths = Paths()
    first, second = (paths.of(torch.device("cuda", index)) for index in range(2))
    assert first is not second
    assert first is paths.of(torch.device("cuda:0"))
    assert isinstance(first.coder(first.stream.mark()), DeviceCoder)
    assert [call.args[0].index for call in cuda.Stream.call_args_list] == [0, 1]
