"""Ways to keep the replicas of a training together, for one that compares them: what each puts under a model.

``gloo``: plain DDP in float32. ``fp16``: torch's ``fp16_compress_hook``. ``powersgd``: torch's
``powerSGD_hook`` of rank 4 (Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019). ``quantised``: our codes over TCP. ``tailbound``: ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from tailbound.torch import TailboundState, register
from tailbound_lab.bench.powersgd import FIRST, register_powersgd
from tailbound_lab.bench.quantised import register_quantised


def wrap(
    name: str,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    bucket_mib: int | None = None,
    powersgd_start: int = FIRST,
    options: Mapping[str, Any] | None = None,
) -> tuple[nn.Module, TailboundState | None]:
    """Puts the variant ``name`` under ``net``, which has the same weights on all ranks already.

    Args:
        bucket_mib: size of DDP's buckets; None: DDP's own default.
        powersgd_start: steps before PowerSGD compresses.
        options: of ``TailboundState``.

    Returns:
        What to call for the forward pass, and Tailbound's state (None for the others).

    Raises:
        ConfigError: an invalid option.
        CapabilityError, AttachError, LayoutError, TransportError: Tailbound cannot take part.
    """
    # nothing to broadcast, which would take its time over lossy links
    model = DistributedDataParallel(net, init_sync=False, bucket_cap_mb=bucket_mib)
    if name == "tailbound":
        return model, register(model, optimizer=optimizer, **(options or {}))
    if name == "fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    elif name == "powersgd":
        register_powersgd(model, powersgd_start)
    elif name == "quantised":
        register_quantised(model)
    return model, None
