"""Tailbound for PyTorch: ``register(ddp_model)``, or the hook and its state by hand."""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("tailbound.torch needs PyTorch: pip install 'tailbound[torch]'") from error

from tailbound.autoload import register_backend
from tailbound.torch import elastic
from tailbound.torch.backend import BackendOptions, TailboundProcessGroup, bounded, end_step, exact
from tailbound.torch.batches import batches
from tailbound.torch.hook import allreduce_hook
from tailbound.torch.register import register
from tailbound.torch.scaler import GradScaler
from tailbound.torch.state import TailboundState

register_backend()

__all__ = [
    "BackendOptions",
    "GradScaler",
    "TailboundProcessGroup",
    "TailboundState",
    "allreduce_hook",
    "batches",
    "bounded",
    "elastic",
    "end_step",
    "exact",
    "register",
]
