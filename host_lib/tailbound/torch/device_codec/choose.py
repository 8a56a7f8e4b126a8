"""Whether a device codes by kernels of Triton, or buckets are copied to the host and coded there."""

from __future__ import annotations

import logging

from tailbound.settings.table import DEVICE_CODEC
from tailbound.torch.device_codec.form import Form

log = logging.getLogger("tailbound")


def triton_form() -> Form | None:
    """Triton's kernels; None where triton cannot be imported, which is logged, or the variable asks for the host."""
    if DEVICE_CODEC.read() == "host":
        return None
    try:
        from tailbound.torch.device_codec.fused import TRITON
    except Exception as error:  # an installation that is broken, say: the host's passes need nothing of it
        log.warning("buckets on devices are copied to the host and coded there; triton cannot be imported: %s", error)
        return None
    return TRITON
