"""What ``transport.control.Stamp`` is given: partial checks of payloads that no codec wrote."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailbound.wire.check import partial
from tailbound.wire.schema import HEADER_BYTES


def partials(packets: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Partial checks of the payloads of u8[T, stride]: u64[T, 4]."""
    states = np.zeros((len(packets), 4), np.uint64)
    for packet, state in zip(packets, states, strict=True):
        partial(packet[HEADER_BYTES:].view(np.uint64), state)
    return states
