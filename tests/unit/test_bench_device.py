"""``bench codec`` and ``bench train`` with ``--device cuda``, as far as there is no GPU; with one, all rows come."""

from __future__ import annotations

from typing import Any

import pytest

from tailbound.errors import CapabilityError, ConfigError
from tailbound_lab.bench.train_plan import plan

pytestmark = pytest.mark.needs("torch")


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("without_gpu")
def test_without_a_gpu_it_says_so() -> None:
    from tailbound_lab.bench.course import device_of
    from tailbound_lab.bench.device import run

    with pytest.raises(CapabilityError, match="no CUDA device"):
        run(quick=True)
    with pytest.raises(ConfigError, match="above 0"):
        run(megabytes=0)
    with pytest.raises(CapabilityError, match="no CUDA device"):
        device_of("cuda", 0)
    assert device_of("cpu", 3) == "cpu"
    assert [scenario.device for scenario in plan(["compute", "accuracy"], device="cuda")] == ["cuda"] * 2


def test_ranks_share_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from tailbound_lab.bench.course import device_of

    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert [device_of("cuda", rank) for rank in range(4)] == ["cuda:0", "cuda:1"] * 2
    assert taken == [0, 1, 0, 1]


def test_an_op_is_coded_as_in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """On host memory, in the place of a device: all four calls do what they are timed for."""
    import torch

    from tailbound.torch.device_codec.plain import PLAIN
    from tailbound.torch.device_coder import Workspace
    from tailbound.torch.streams import Stream
    from tailbound_lab.bench import device

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    shape = device.shape_for(100_000, device.WIDTH)
    op: Any = device._Op(shape, torch.randn(100_000))
    space = Workspace(Stream(), PLAIN)
    found = []
    for encode, decode in (
        (op.encode_by_host, op.decode_by_host),
        (lambda: op.encode(space), lambda: op.decode(space)),
    ):
        op._packets.memory[:], op._out[:] = 0, 0.0
        assert min(time for time in (*encode(), *decode()) if time is not None) >= 0
        found.append((op._packets.memory.copy(), op._out.clone()))
    (packets, values), (other_packets, other_values) = found
    assert (packets == other_packets).all()
    assert values.any()
    assert torch.equal(values, other_values)


@pytest.mark.needs("CUDA device")
def test_every_pass_has_a_row() -> None:
    from tailbound_lab.bench.device import TYPES, run

    rows = run(quick=True, megabytes=0.5)
    assert {row["form"] for row in rows} == {"-", "triton", "torch", "host"}
    for kind in TYPES:
        names = [row["name"] for row in rows if row["dtype"] == kind and row["form"] != "-"]
        assert sorted(names) == sorted(["largest", "codes", "averages"] * 2 + ["encode", "decode"] * 3)
    assert all((row["device_ms"] or row["ms"]) > 0 for row in rows)
