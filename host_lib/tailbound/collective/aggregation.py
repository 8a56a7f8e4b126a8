"""Who sums the rows of an op: its ranks, each its own share, or a switch that all rows pass (in-network aggregation).

Which of the two an op has is said by its owner map. All that differs between them is behind this interface; ``peers``
and ``switched`` implement it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.scale import Weights
from tailbound.collective.job import Job
from tailbound.collective.known import Known
from tailbound.collective.op import Op
from tailbound.collective.peers import PeerOwned
from tailbound.collective.switched import SwitchOwned
from tailbound.collective.tally import Counts


class Aggregation(Protocol):
    """What an op needs of whoever sums its rows. Without state: that lies in the op."""

    def late_rows_serve(self, known: Known, op: Op) -> bool:
        """Whether own rows that come too late for the sums still serve this rank."""

    def weights(self, known: Known) -> Weights | None:
        """What sums have room for, if codes have scales of their own (codec-5)."""

    def in_time(self, op: Op) -> bool:
        """Whether own rows that are coded now go into the sums."""

    def send(self, job: Job, op: Op) -> None:
        """Stamps the coded rows and hands them to the send queue."""

    def read(self, job: Job, op: Op, by_owner: Counts) -> NDArray[np.uint16] | None:
        """Notes which results are there and who was missing, at the end of an op.

        Args:
            by_owner: i64[world], written: results present.

        Returns:
            Contributors by row (u16[rows]) where results are sums; None where they are means.
        """


_BY_PEERS: Aggregation = PeerOwned()
_BY_SWITCH: Aggregation = SwitchOwned()


def of(op: Op) -> Aggregation:
    """Who sums the rows of ``op``."""
    return _BY_SWITCH if op.switched else _BY_PEERS
