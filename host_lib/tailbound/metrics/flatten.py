"""A rank's status as a flat list of metrics, named as Prometheus has it: base units, ``_total`` for counters. Pure.

One table has the names. ``tailbound.collective.report.status`` has what the paths in it mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from tailbound.wire.schema import MISSING

PREFIX = "tailbound_"
_MS, _US, _MBIT = 1e-3, 1e-6, 1e6 / 8
#: Events that are worth an alert: told from the first reading on, or an increase would not see the first one.
_ALERTS = (
    "away", "bursts_lost", "callback_failed", "cannot_send", "forged", "held_up", "keys_tried", "late",
    "learning_failed", "link_loses", "loss", "rank_died", "rank_left", "skipped", "suspect",
)  # fmt: skip
_FATES = "Rows of a peer that did not come in time. " + " ".join(
    f"{fate}: {fate.meaning}. {fate.advice}." for fate in MISSING
)

#: Of a rank: name, place in the status, factor, help.
_OF_RANK = (
    ("ranks", "ranks", 1.0, "World size."),
    ("ops_total", "ops", 1.0, "All-reduce ops ended."),
    ("ops_incomplete_total", "ops_incomplete", 1.0, "Ops that ended with rows missing."),
    ("ops_late_total", "ops_late", 1.0, "Ops for which this rank was too late to contribute."),
    ("ops_skipped_total", "ops_skipped", 1.0, "Ops that were not applied: a limit on loss."),
    ("ops_minority_total", "ops_minority", 1.0, "Ops that were void: fewer than a majority had part in them."),
    ("deadline_hits_total", "deadline_hits", 1.0, "Halves of ops that a deadline ended."),
    ("delivered_ratio", "delivered", 1.0, "Share of all rows expected so far that came in time."),
    ("overtime_seconds_total", "overtime_ms waited", _MS, "Time that ops have waited past their deadlines."),
    ("answer_seconds", "overtime_ms answer", _MS, "Time of the slowest of the last answers of others."),
    ("core_lack_seconds", "overtime_ms lack", _MS, "Longest wait of one of the last ops for a core."),
    ("core_wait_seconds_total", "overtime_ms lacked", _MS, "Time that ops have waited for a core."),
    ("steps_behind", "behind", 1.0, "Steps that the newest rank is ahead of this one."),
    ("map_id", "map id", 1.0, "Owner map in use."),
)
#: The same of each peer.
_OF_PEER = (
    ("rows_expected_total", "expected", 1.0, "Rows that a peer should have brought."),
    ("rows_taken_total", "taken", 1.0, "Rows of a peer that came in time."),
    ("rows_repaired_total", "repaired", 1.0, "Rows taken that had been asked for again."),
    ("sent_packets_total", "sent_packets", 1.0, "Packets handed to the kernel."),
    ("sent_bytes_total", "sent_bytes", 1.0, "Bytes handed to the kernel."),
    ("peer_lateness_seconds", "lateness_ms", _MS, "Lateness that a rank tells of itself."),
    ("peer_rtt_seconds", "rtt_us", _US, "Round trip to a rank; 0: not measured."),
    ("peer_rate_bytes_per_second", "rate_mbit_s", _MBIT, "Pace towards a rank; 0: unlimited."),
)
#: Of a table in the status: name, place, factor, help, and the label that has the table's keys.
_BY_KEY = (
    ("deadline_seconds", "deadlines_ms", _MS, "D1, D2 and q as they are learned now.", "deadline"),
    ("packets_refused_total", "drops", 1.0,
     "Packets that the datapath did not take. docs/wire.md has meaning and advice of each reason.", "reason"),
    ("lost_on_arrival_total", "lost_on_arrival", 1.0, "Packets that this host lost before any rule saw them.", "place"),
    ("counter_total", "counters", 1.0, "Everything else that a rank counts, by name.", "counter"),
)  # fmt: skip


class Metric(NamedTuple):
    """One value.

    Attributes:
        name: as in Prometheus, with unit; ``_total`` at its end: a counter, which rises only.
        value: a number; NaN never.
        labels: name to value, ``rank`` and ``job`` (the cookie) among them.
        help: what it is, the same for all metrics of the name.
    """

    name: str
    value: float
    labels: Mapping[str, str]
    help: str


class _Sheet:
    """Collects metrics that have some labels in common."""

    def __init__(self, **labels: str) -> None:
        self._labels = labels
        self.metrics: list[Metric] = []

    def add(self, name: str, value: Any, text: str, scale: float = 1.0, /, **labels: str) -> None:
        if isinstance(value, int | float) and not math.isnan(value):
            self.metrics.append(Metric(PREFIX + name, value * scale, self._labels | labels, text))


def flatten(status: Mapping[str, Any]) -> list[Metric]:
    """Metrics of one rank.

    Args:
        status: ``stats()["status"]``, or the content of a status file; whatever lacks in it makes no metric.
    """
    sheet = _Sheet(rank=str(status.get("rank", "")), job=str(status.get("cookie", "")))
    for name, place, scale, text in _OF_RANK:
        sheet.add(name, _at(status, place), text, scale)
    for quantile, place in (("0.5", "p50_ms"), ("0.99", "p99_ms")):
        sheet.add("op_seconds", status.get(place), "Launch to result, over the last 512 ops.", _MS, quantile=quantile)
    for name, place, scale, text, label in _BY_KEY:
        for key, value in status.get(place, {}).items():
            sheet.add(name, value, text, scale, **{label: key.lower()})
    owners = status.get("map", {}).get("owners", [])
    for owner in sorted(set(owners)):
        share = owners.count(owner) / len(owners)
        sheet.add("owner_share_ratio", share, "Share of the rows that a rank owns.", owner=str(owner))
    for peer, one in status.get("peers", {}).items():
        _peer(sheet, peer, one)
    if (counts := status.get("event_counts")) is not None:
        for name, value in (dict.fromkeys(_ALERTS, 0) | counts).items():
            sheet.add("events_total", value, "Structured log events, by name.", event=name)
    return sheet.metrics


def _at(status: Mapping[str, Any], place: str) -> Any:
    found: Any = status
    for name in place.split():
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _peer(sheet: _Sheet, peer: str, one: Mapping[str, Any]) -> None:
    for name, place, scale, text in _OF_PEER:
        sheet.add(name, one.get(place), text, scale, peer=peer)
    for fate in MISSING:
        # a gauge: an absent row may still come, and is late then
        sheet.add("rows_missing", one.get(fate), _FATES, peer=peer, fate=fate.value)
    suspect = one.get("suspect", "")
    sheet.add("peer_suspect", int(suspect not in ("", "bye")), "1 while this rank does not wait for a peer.", peer=peer)
    sheet.add("peer_gone", int(suspect == "bye"), "1 after a peer's goodbye.", peer=peer)
