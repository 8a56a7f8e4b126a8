"""The benchmark's rivals average on the host, wherever a model's gradients lie."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.needs("torch")


def test_a_rival_averages_a_bucket_on_a_device_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """``bench train --variants quantised --device cuda`` ended with a TypeError of ``numpy()``."""
    import torch

    from tailbound_lab.bench import quantised

    class OnDevice(torch.Tensor):
        """As one on a GPU: numpy has no view of it."""

        def numpy(self, **_: Any) -> Any:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

        def cpu(self, *_: Any) -> torch.Tensor:
            return self.as_subclass(torch.Tensor).clone()

    def halve(buffer: torch.Tensor) -> None:
        values = buffer.numpy()
        values /= 2

    hooks: list[Any] = []
    monkeypatch.setattr(quantised.dist, "new_group", lambda: object())
    monkeypatch.setattr(quantised, "Quantised", lambda *_: SimpleNamespace(mean=halve))
    quantised.register_quantised(SimpleNamespace(register_comm_hook=lambda _, made: hooks.append(made)))  # type: ignore[arg-type]
    for made in (torch.ones(3).as_subclass(OnDevice), torch.ones(3)):
        bucket = SimpleNamespace(index=lambda: 0, buffer=lambda made=made: made)
        assert hooks[0](None, bucket).wait().tolist() == [0.5, 0.5, 0.5]
        assert made.tolist() == [0.5, 0.5, 0.5]
