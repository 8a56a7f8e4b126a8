"""Metrics of all ranks on this host, from the status files that they write anyway: a trainer needs no package for it.

``tailbound metrics`` serves them to Prometheus (the extra ``prometheus``, in the environment of that command alone).
Names are those of ``metrics.flatten``; what stands in ``stats()`` but not in a status (the ledger by stage, counters)
is not there; rows have ``both`` for a stage, and refused packets ``all`` for a sender.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tailbound.metrics.flatten import Metric, flatten
from tailbound.observe import status

#: What of ``stats()`` a status repeats for each peer.
_SENT = {"packets": "sent_packets", "bytes": "sent_bytes"}
#: Seconds after which nothing but its age is told of a status: what it says is no longer so.
SILENT = 30.0


def host_metrics(where: Callable[[], Iterable[Path]] = status.folders) -> list[Metric]:
    """One reading.

    Args:
        where: gives the folders to read; asked anew in every reading, since users come and go.
    """
    return [metric for one in status.read(where()) for metric in _of(one)]


def _of(one: Mapping[str, Any]) -> list[Metric]:
    """A rank's metrics; none of a file that is no status of this version."""
    labels = {"rank": str(one["rank"]), "job": str(one.get("cookie"))}
    text = "Seconds since the rank wrote its status: a process that is stopped or was killed writes none."
    age = Metric("tailbound_status_age_seconds", "gauge", one["age"], labels, text)
    if one["age"] > SILENT:
        return [age]
    try:
        peers = one["peers"]
        stats = {
            "rank": one["rank"],
            "ranks": one["ranks"],
            "status": one,
            "delivered": one["delivered"],
            "sent": {peer: {to: p[of] for to, of in _SENT.items()} for peer, p in peers.items()},
            "ledger": {"both": peers},
            "drops_by_sender": {"all": one["drops"]},
            "event_counts": one["event_counts"],
        }
        metrics = flatten(stats)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return []
    return [*metrics, age]
