"""Streams of devices: what is asked of ``torch.cuda``, by a mock where there is no GPU, and memory for copies.

Host memory for copies is not filled anew before the device has read it, and codes are all that crosses.
"""

from __future__ import annotations

from threading import Thread
from typing import Any
from unittest import mock

import numpy as np
import pytest

from device_cases import SCRATCH, SEED, WEIGHTS, Outputs, Results, gaussian, slow_stream
from tailbound.codec.records import Coding, Packets
from tailbound.codec.shape import shape_for
from tailbound.errors import ConfigError

pytest.importorskip("torch", reason="missing capability 'torch': pip install 'tailbound[torch]'")
import torch

from plain_form import PLAIN
from tailbound.collective.coder import HOST
from tailbound.torch import streams
from tailbound.torch.device_coder import DeviceCoder
from tailbound.torch.paths import DevicePath, Paths
from tailbound.torch.streams import CudaStream, settle_thread


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> mock.MagicMock:
    monkeypatch.setattr(streams, "_cuda", found := mock.MagicMock())
    found.Event.side_effect = lambda **_: mock.MagicMock()
    return found


def test_the_side_stream_works_behind_the_mark_and_others_behind_it(cuda: mock.MagicMock) -> None:
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


def test_every_use_comes_behind_the_mark_and_waits_for_no_event() -> None:
    stream, numel = slow_stream(), 500_000
    coder = DeviceCoder(DevicePath(stream, PLAIN), "ready")
    shape, x = shape_for(numel, 1408), torch.from_numpy(gaussian(numel)).double()
    coding, out = Coding(SEED, WEIGHTS), Outputs(shape)
    packets = Packets(out.packets, out.placement.position, out.partials)
    ready = coder.prepare(x, shape, coding)
    assert not ready()
    with pytest.raises(RuntimeError, match="before a device is through"):
        coder.measure(x, shape, coding, out.need, SCRATCH)
    stream.events[0].done = True  # the largest values are there
    assert ready()
    assert coder.measure(x, shape, coding, out.need, SCRATCH)
    assert coder.encode(x, shape, coding, packets, out.scales, SCRATCH) is None  # codes are under way
    assert not ready()
    assert (out.packets == 7).all()
    with pytest.raises(RuntimeError, match="before a device is through"):
        coder.encode(x, shape, coding, packets, out.scales, SCRATCH)
    stream.events[1].done = True
    assert ready()
    assert coder.encode(x, shape, coding, packets, out.scales, SCRATCH) == (True, 0)
    assert (out.packets[:, 64:] > 0).all()
    Results(shape, 1, 0.1).decoded(coder, x, True)
    assert sum(stream.sizes) < 2 * 1.03 * numel, "codes cross, down and up, and neither gradients nor averages do"
    coder.clear(x)
    coder.keep(x, x)
    assert (stream.marks, len(stream.events)) == (["ready"] * 5, 2)
    assert not any(event.waited for event in stream.events)


def test_an_op_of_a_new_kind_is_warmed_up_once_in_the_thread_that_launches_it() -> None:
    """The same kernels with the same arguments but for sizes, those of error feedback too: nothing compiles later."""
    form = mock.Mock(wraps=PLAIN)

    def seen() -> list[tuple[Any, ...]]:
        return [
            (what, given[-1 if what == "decode" else 0].dtype, given[1].bits, np.diff(given[1].layout.rows).tolist())
            for what, given, _ in form.method_calls
        ]

    coder, half, whole = DeviceCoder(DevicePath(slow_stream(), form), None), torch.float16, torch.float32
    for starts in ((), (49_000, 1000), ()):
        shape = shape_for(50_000, 1408, 8, starts)
        coder.warm_up(torch.zeros(50_000, dtype=half), torch.zeros(50_000), shape, Coding(0))
    assert seen() == [
        (what, kind, 8, rows)
        for rows in ([64], [1, 2, 32])
        for what, kind in (("largest", half), ("encode", half), ("decode", whole))
    ]
    form.reset_mock()
    out = torch.zeros(50_000, dtype=torch.bfloat16)
    coder.warm_up(torch.zeros(50_000), out, shape_for(50_000, 1408, (4, 8)), Coding(0))
    assert {one[:3] for one in seen()} >= {("decode", torch.bfloat16, 8), ("decode", whole, 4)}
    form.largest.side_effect = RuntimeError("there is no compiler")
    with pytest.raises(ConfigError, match="there is no compiler"):
        coder.warm_up(torch.zeros(1000).double(), out, shape_for(1000, 1408), Coding(0))


def test_every_device_has_a_path_and_a_stream_of_its_own(cuda: mock.MagicMock) -> None:
    cpu, paths = torch.device("cpu"), Paths()
    assert paths.of(cpu).coder(None) is HOST
    assert isinstance(paths.of(cpu).values(torch.zeros(3)), np.ndarray)
    first, second = (paths.of(torch.device("cuda", index)) for index in range(2))
    assert first is not second
    assert first is paths.of(torch.device("cuda:0"))
    assert isinstance(first.coder(first.stream.mark()), DeviceCoder)
    assert [call.args[0].index for call in cuda.Stream.call_args_list] == [0, 1]
    with pytest.raises(ConfigError, match=r"shape \(3, 2\) cannot be averaged"):
        first.values(torch.zeros(3, 2))
