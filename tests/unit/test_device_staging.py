"""Host memory for copies is not filled anew before the device is through with it, and codes are all that crosses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from device_cases import Results, encoded, gaussian, measured
from tailbound.codec import encode as host
from tailbound.codec.scale import cold_exponents
from tailbound.codec.shape import shape_for

pytestmark = pytest.mark.needs("torch")


class Event:
    """Of a device that is slow: done when it is waited for, or when it is said to be."""

    def __init__(self) -> None:
        self.done, self.waited = False, False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = self.waited = True


def slow_stream() -> Any:
    """A stream of the host that notes what is asked of it."""
    import torch

    from tailbound.torch.streams import HostStream

    class Slow(HostStream):
        def __init__(self) -> None:
            super().__init__(torch.device("cpu"))
            self.events: list[Event] = []
            self.marks: list[Any] = []
            self.sizes: list[int] = []

        def use(self, mark: Any = None) -> Any:
            self.marks.append(mark)
            return super().use()

        def event(self) -> Any:
            self.events.append(Event())
            return self.events[-1]

        def host_memory(self, size: int) -> torch.Tensor:
            self.sizes.append(size)
            return super().host_memory(size)

    return Slow()


def test_a_block_is_used_again_only_when_its_event_has_happened() -> None:
    from tailbound.torch.staging import Blocks

    stream = slow_stream()
    blocks = Blocks(stream)
    first = blocks.take(1000)
    blocks.give(first)
    second = blocks.take(1000)  # the first one may still be read
    assert second is not first
    blocks.give(second)
    assert blocks.take(1000) is first  # more than two are not made: it is waited for
    assert [event.waited for event in stream.events] == [True, False]
    blocks.give(first)
    stream.events[1].done = True
    assert blocks.take(1000) is second
    assert len(stream.sizes) == 2


def test_a_block_grows_and_is_handed_out_aligned() -> None:
    import torch

    from tailbound.torch.staging import Block

    stream = slow_stream()
    block = Block(stream)
    block.reserve(1000)
    first, second = block.piece(7, dtype=torch.uint8), block.piece(3, 5, dtype=torch.float32)
    assert second.data_ptr() - first.data_ptr() == 64
    assert second.shape == (3, 5)
    with pytest.raises(ValueError, match="do not fit a block of 1000"):
        block.piece(1000, dtype=torch.uint8)
    block.reserve(500)
    assert block.piece(1, dtype=torch.int16).data_ptr() == first.data_ptr()
    block.reserve(2000)
    assert stream.sizes == [1000, 2000]


def test_every_use_comes_behind_the_mark_and_reads_behind_an_event() -> None:
    import torch

    from tailbound.torch.device_coder import DeviceCoder, Workspace

    stream = slow_stream()
    coder = DeviceCoder(Workspace(stream), "ready")
    shape, x = shape_for(50_000, 1408), torch.from_numpy(gaussian(50_000))
    exponents = cold_exponents(measured(host, x.numpy(), shape)[None], 2)
    measured(coder, x, shape)
    encoded(coder, x, shape, exponents)
    # largest values before the host reads them, and codes; one is for the block when it is given back
    assert [event.waited for event in stream.events] == [True, False, True, True, False]
    Results(shape, 1, 0.1).decoded(coder, x, True)
    assert not stream.events[-1].waited  # nobody waits for an average here
    coder.clear(x)
    coder.keep(x, x)
    assert stream.marks == ["ready"] * 5


def test_little_more_than_a_byte_an_entry_crosses() -> None:
    """Neither gradients nor averages do, whatever their type."""
    import torch

    from tailbound.torch.device_coder import DeviceCoder, Workspace

    stream = slow_stream()
    coder = DeviceCoder(Workspace(stream), None)
    numel = 1_000_000
    shape, x = shape_for(numel, 1408), torch.from_numpy(gaussian(numel)).double()
    exponents = np.full(shape.groups, 10, np.int16)
    encoded(coder, x, shape, exponents)
    Results(shape, 1, 0.0).decoded(coder, x, True)
    assert len(stream.sizes) == 2
    assert max(stream.sizes) < 1.03 * numel


def test_a_path_hands_on_what_its_coder_takes() -> None:
    import torch

    from tailbound.collective.coder import HOST
    from tailbound.errors import ConfigError
    from tailbound.torch.device_coder import DeviceCoder
    from tailbound.torch.paths import Paths

    cpu = torch.device("cpu")
    plain, device = Paths(), Paths(host_as_device=True)
    assert plain.of(cpu) is plain.of(cpu)
    assert plain.of(cpu).coder(None) is HOST
    assert isinstance(plain.of(cpu).values(torch.zeros(3)), np.ndarray)
    assert isinstance(device.of(cpu).coder(None), DeviceCoder)
    assert device.of(cpu).values(torch.zeros(3)).shape == (3,)
    with pytest.raises(ConfigError, match=r"shape \(3, 2\) cannot be averaged"):
        device.of(cpu).values(torch.zeros(3, 2))


def test_work_within_a_path_is_done_in_its_stream() -> None:
    from tailbound.torch.paths import DevicePath, HostPath

    stream, seen = slow_stream(), []
    DevicePath(stream).within(seen.append, "ready")(1)
    assert (seen, stream.marks) == ([1], ["ready"])
    HostPath().within(seen.append, "ready")(2)
    assert seen == [1, 2]
