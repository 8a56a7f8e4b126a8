"""From ``stats()`` to a flat list of metrics, named as Prometheus has it: base units, ``_total`` for counters. Pure.

What ``stats()`` holds is told in ``tailbound.collective.report``. Numbers that it gains later appear by their path
until they get a name here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from tailbound.wire.schema import MISSING

PREFIX = "tailbound_"
_MS, _US = 1e-3, 1e-6
#: Parts of ``stats()`` that say again what others say, that are words, or that are exported under another name.
LEFT_OUT = frozenset({
    "rank", "ranks", "datapath", "authenticated", "peers", "verdicts", "drops", "events",
})  # fmt: skip
#: Events that are worth an alert: told from the first reading on, or an increase would not see the first one.
_ALERTS = (
    "away", "bursts_lost", "callback_failed", "cannot_send", "forged", "held_up", "keys_tried", "late",
    "learning_failed", "link_loses", "loss", "not_linear", "rank_died", "rank_left", "skipped", "suspect",
)  # fmt: skip
_FATES = "Rows of a peer that did not come in time. " + " ".join(
    f"{fate}: {fate.meaning}. {fate.advice}." for fate in MISSING
)
_REASONS = "Packets that the datapath did not take. docs/wire.md has meaning and advice of each reason."


class Metric(NamedTuple):
    """One value.

    Attributes:
        name: as in Prometheus, with unit.
        kind: ``counter`` rises only; ``gauge`` is as it is now.
        value: a number; NaN never.
        labels: name to value, ``rank`` and ``job`` (the cookie) among them.
        help: what it is, the same for all metrics of the name.
    """

    name: str
    kind: Literal["counter", "gauge"]
    value: float
    labels: Mapping[str, str]
    help: str


class _Sheet:
    """Collects metrics that have some labels in common."""

    def __init__(self, **labels: str) -> None:
        self._labels = labels
        self.metrics: list[Metric] = []

    def gauge(self, name: str, value: Any, text: str, scale: float = 1.0, /, **labels: str) -> None:
        self._add("gauge", PREFIX + name, value, text, scale, labels)

    def count(self, name: str, value: Any, text: str, /, **labels: str) -> None:
        self._add("counter", f"{PREFIX}{name}_total", value, text, 1.0, labels)

    def _add(
        self, kind: Literal["counter", "gauge"], name: str, value: Any, text: str, scale: float, labels: dict[str, str]
    ) -> None:
        if isinstance(value, int | float) and not math.isnan(value):
            self.metrics.append(Metric(name, kind, value * scale, self._labels | labels, text))


def flatten(stats: Mapping[str, Any]) -> list[Metric]:
    """Metrics of one rank.

    Args:
        stats: as ``TailboundState.stats`` or ``Communicator.stats`` returns it; empty (a world of one): no metrics.
    """
    if not stats:
        return []
    status = stats.get("status", {})
    sheet = _Sheet(rank=str(stats.get("rank", "")), job=str(status.get("cookie", "")))
    sheet.gauge("ranks", stats.get("ranks"), "World size.")
    _ops(sheet, status)
    _rows(sheet, stats)
    for peer, one in status.get("peers", {}).items():
        _peer(sheet, peer, one)
    _traffic(sheet, stats)
    for name, value in stats.get("counters", {}).items():
        sheet.count("counter", value, "Everything else that a rank counts, by name.", counter=name)
    for place, value in stats.get("lost_on_arrival", {}).items():
        sheet.count("lost_on_arrival", value, "Packets that this host lost before any rule saw them.", place=place)
    if (counts := stats.get("event_counts")) is not None:
        for name, value in (dict.fromkeys(_ALERTS, 0) | counts).items():
            sheet.count("events", value, "Structured log events, by name.", event=name)
    known = LEFT_OUT | {
        "status", "delivered", "rows_summed", "drops_by_sender", "ledger", "sent", "suspects", "dead", "gone",
        "safeguard", "traffic", "choice", "counters", "event_counts", "lost_on_arrival",
    }  # fmt: skip
    for name, value in stats.items():
        if name not in known:
            _rest(sheet, name, value)
    return sheet.metrics


def _ops(sheet: _Sheet, status: Mapping[str, Any]) -> None:
    sheet.count("ops", status.get("ops"), "All-reduce ops ended.")
    sheet.count("ops_incomplete", status.get("ops_incomplete"), "Ops that ended with rows missing.")
    sheet.count("ops_late", status.get("ops_late"), "Ops for which this rank was too late to contribute.")
    sheet.count("ops_skipped", status.get("ops_skipped"), "Ops that were not applied: a limit on loss.")
    sheet.count("deadline_hits", status.get("deadline_hits"), "Halves of ops that a deadline ended.")
    for quantile, key in (("0.5", "p50_ms"), ("0.99", "p99_ms")):
        sheet.gauge("op_seconds", status.get(key), "Launch to result, over the last 512 ops.", _MS, quantile=quantile)
    for name, value in status.get("deadlines_ms", {}).items():
        sheet.gauge("deadline_seconds", value, "D1, D2 and q as they are learned now.", _MS, deadline=name)
    overtime = status.get("overtime_ms", {})
    waited = overtime.get("waited")
    sheet.count("overtime_seconds", waited and waited * _MS, "What ops have waited past their deadlines.")
    sheet.gauge("answer_seconds", overtime.get("answer"), "What the slowest of the last answers of others took.", _MS)
    sheet.gauge("woke_late_seconds", overtime.get("late"), "How late the own transport thread wakes up.", _MS)
    sheet.gauge("core_lack_seconds", overtime.get("lack"), "What it waited for a core in an op, the most of late.", _MS)
    lacked = overtime.get("lacked")
    sheet.count("core_wait_seconds", lacked and lacked * _MS, "What it has waited for a core.")
    sheet.gauge("steps_behind", status.get("behind"), "Steps that the newest rank is ahead of this one.")
    owner_map = status.get("map", {})
    sheet.gauge("map_id", owner_map.get("id"), "Owner map in use.")
    owners = owner_map.get("owners", [])
    for owner in sorted(set(owners)):
        share = owners.count(owner) / len(owners)
        sheet.gauge("owner_share_ratio", share, "Share of the rows that a rank owns.", owner=str(owner))


def _rows(sheet: _Sheet, stats: Mapping[str, Any]) -> None:
    sheet.gauge("delivered_ratio", stats.get("delivered"), "Share of all rows expected so far that came in time.")
    sheet.count("rows_summed", stats.get("rows_summed"), "Contributions added on this rank.")
    for stage, peers in stats.get("ledger", {}).items():
        for peer, entry in peers.items():
            _ledger(sheet, entry, stage=stage, peer=peer)
    for name, value in stats.get("safeguard", {}).items():
        sheet.gauge("smoothed_loss_ratio", value, "Smoothed loss that warnings go by.", of=name)
    for sender, reasons in stats.get("drops_by_sender", {}).items():
        for reason, packets in reasons.items():
            sheet.count("packets_refused", packets, _REASONS, sender=sender, reason=reason.lower())


def _ledger(sheet: _Sheet, entry: Mapping[str, int], **where: str) -> None:
    """What became of the rows of one peer."""
    sheet.count("rows_expected", entry["expected"], "Rows that a peer should have brought.", **where)
    sheet.count("rows_taken", entry["taken"], "Rows of a peer that came in time.", **where)
    for fate in MISSING:
        # a gauge: an absent row may still come, and is late then
        sheet.gauge("rows_missing", entry[fate], _FATES, fate=fate.value, **where)
    sheet.count("rows_repaired", entry["repaired"], "Rows taken that had been asked for again.", **where)
    sheet.count("rows_duplicated", entry.get("duplicated"), "Rows that were there already.", **where)


def _peer(sheet: _Sheet, peer: str, one: Mapping[str, Any]) -> None:
    sheet.gauge("peer_lateness_seconds", one.get("lateness_ms"), "How late a rank says it is.", _MS, peer=peer)
    sheet.gauge("peer_deadline_seconds", one.get("deadline_ms"), "D1 that a rank advertises.", _MS, peer=peer)
    sheet.gauge("peer_rtt_seconds", one.get("rtt_us"), "Round trip to a rank; 0: not measured.", _US, peer=peer)
    rate = one.get("rate_mbit_s")
    sheet.gauge("peer_rate_bytes_per_second", rate, "Pace towards a rank; 0: unlimited.", 1e6 / 8, peer=peer)
    for letter, stage in (("c", "contributions"), ("r", "results")):
        said = letter in one.get("suspect", "") and one["suspect"] != "bye"
        sheet.gauge("peer_suspect", int(said), "1 while nobody waits for a rank.", peer=peer, stage=stage)
    sheet.gauge("peer_gone", int(one.get("suspect") == "bye"), "1 after a rank's goodbye.", peer=peer)


def _traffic(sheet: _Sheet, stats: Mapping[str, Any]) -> None:
    for peer, one in stats.get("sent", {}).items():
        sheet.count("sent_packets", one.get("packets"), "Packets handed to the kernel.", peer=peer)
        sheet.count("sent_bytes", one.get("bytes"), "Bytes handed to the kernel.", peer=peer)
        sheet.count("sent_calls", one.get("calls"), "System calls that sent.", peer=peer)
        sheet.count("send_failures", one.get("lost"), "Packets that the kernel did not take.", peer=peer)
    traffic = stats.get("traffic", {})
    sheet.gauge("queued_packets", traffic.get("queued"), "Packets waiting to be sent.")
    sheet.count("stale_packets", traffic.get("stale"), "Packets dropped before sending: nobody takes them any more.")
    sheet.count("socket_full", traffic.get("socket_full"), "Waits for room in a socket.")
    sheet.count("held_by_rate", traffic.get("held_by_rate"), "Bursts held back by pacing.")
    for peer, share in (traffic.get("grants") or {}).items():
        sheet.gauge("granted_ratio", share, "Part of the link's speed that a rank grants a sender.", peer=peer)
    sheet.count("packets_marked", traffic.get("marked"), "Packets of others that came with CE (a queue on the way).")
    sheet.count("own_packets_marked", traffic.get("marked_there"), "Own packets that came to other ranks with CE.")
    sheet.count("slowed_by_marks", traffic.get("slowed"), "Times that marks have lowered a rate.")
    sheet.gauge("incast_advertised", traffic.get("incast"), "Senders taken at once.")
    clones = stats.get("choice", {}).get("clones_failed", {})
    for peer, packets in clones.items():
        sheet.count("clones_failed", packets, "Fan-out copies that a device did not take.", peer=peer)


def _rest(sheet: _Sheet, name: str, value: Any) -> None:
    """Numbers without a name of their own, by their path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _rest(sheet, f"{name}_{key}", inner)
    else:
        sheet.gauge(_clean(name), value, "As in stats().")


def _clean(name: str) -> str:
    """``name`` with letters, digits and underscores only."""
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in name.lower())
