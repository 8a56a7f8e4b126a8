"""Which form a device codes in: Triton's kernels on CUDA, where triton is there, else operations of torch."""

from __future__ import annotations

import functools
import logging

import torch

from tailbound.errors import ConfigError
from tailbound.settings.table import DEVICE_CODEC
from tailbound.torch.device_codec.form import Form
from tailbound.torch.device_codec.plain import PLAIN

log = logging.getLogger("tailbound")


def form_for(device: torch.device) -> Form:
    """Triton's kernels on a CUDA device, if triton is there and nobody has turned them off; else torch's operations.

    Raises:
        ConfigError: the variable asks for Triton, and it cannot be imported.
    """
    asked = DEVICE_CODEC.read()
    if asked == "torch" or (asked == "auto" and device.type != "cuda"):
        return PLAIN
    form, why = _triton()
    if form is None:
        if asked == "triton":
            raise ConfigError(f"{DEVICE_CODEC.variable}=triton: it cannot be imported ({why}): pip install triton")
        return PLAIN
    return form


@functools.cache
def _triton() -> tuple[Form | None, str]:
    """Triton's form, or why there is none; that is logged once."""
    try:
        from tailbound.torch.device_codec.fused import TRITON
    except Exception as error:  # an installation that is broken, say: the plain form needs nothing
        log.warning("buckets are coded by operations of torch, since triton cannot be imported: %s", error)
        return None, str(error)
    return TRITON, ""
