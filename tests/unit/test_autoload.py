"""What ``import torch`` calls must never raise."""

from __future__ import annotations

import pytest

from tailbound.autoload import register_backend

pytestmark = pytest.mark.needs("torch")


def test_it_registers_once() -> None:
    import torch.distributed as dist

    register_backend()
    register_backend()
    assert dist.Backend.backend_list.count("tailbound") == 1
    assert dist.Backend("tailbound") == "tailbound"


def test_a_torch_that_refuses_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    def refuse(*_: object, **__: object) -> None:
        raise TypeError("another signature")

    monkeypatch.setattr(dist.Backend, "backend_list", [])
    monkeypatch.setattr(dist.Backend, "register_backend", refuse)
    register_backend()
