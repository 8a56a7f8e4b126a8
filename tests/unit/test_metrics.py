"""Metrics are the numbers of ``stats()``, with units and labels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import MS, Team, Trouble, gradients, patient, team
from tailbound.metrics import flatten as flatten_module
from tailbound.metrics.flatten import Metric, flatten
from tailbound.wire.schema import PacketType

NUMEL = 8 * 64 * 256
RANKS = 3


@pytest.fixture(scope="module")
def job() -> Iterator[Team]:
    """Three ranks over udp after some ops with losses, at rest."""
    with team(RANKS, patient(quiet=20 * MS, share_rows=False)) as whole:
        for member in whole.communicators:
            Trouble(5, loss=0.02, duplicate=0.02, types=frozenset({PacketType.RESULT})).attach(member)
        for op in range(4):
            whole.allreduce(gradients("U", RANKS, NUMEL, seed=op))
        yield whole


@pytest.fixture(scope="module")
def stats(job: Team) -> dict[str, Any]:
    return job[1].stats()


def by_key(metrics: list[Metric]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {(m.name, frozenset(m.labels.items())): m.value for m in metrics}
    assert len(found) == len(metrics), "two metrics with the same name and labels"
    return found


def one(metrics: list[Metric], name: str, **labels: str) -> float:
    (value,) = [m.value for m in metrics if m.name == name and labels.items() <= m.labels.items()]
    return value


def test_metrics_are_the_numbers_of_stats(stats: dict[str, Any]) -> None:
    status = stats["status"]
    metrics = flatten(status)
    by_key(metrics)
    assert one(metrics, "tailbound_ranks") == RANKS
    assert one(metrics, "tailbound_ops_total") == 4
    assert one(metrics, "tailbound_delivered_ratio") == stats["delivered"]
    assert one(metrics, "tailbound_op_seconds", quantile="0.99") == pytest.approx(status["p99_ms"] / 1000)
    assert one(metrics, "tailbound_deadline_seconds", deadline="d2") == pytest.approx(
        status["deadlines_ms"]["d2"] / 1000
    )
    assert one(metrics, "tailbound_counter_total", counter="ops") == 4
    assert one(metrics, "tailbound_events_total", event="results_by") == 1
    for peer in ("0", "2"):
        assert one(metrics, "tailbound_sent_bytes_total", peer=peer) == stats["sent"][peer]["bytes"] > 0
        assert one(metrics, "tailbound_peer_suspect", peer=peer) == 0
        expected = one(metrics, "tailbound_rows_expected_total", peer=peer)
        taken = one(metrics, "tailbound_rows_taken_total", peer=peer)
        missing = [m for m in metrics if m.name == "tailbound_rows_missing" and m.labels["peer"] == peer]
        books = [stats["ledger"][stage][peer] for stage in ("contributions", "results")]
        assert taken + sum(m.value for m in missing) == expected == sum(entry["expected"] for entry in books) > 0
        assert taken == sum(entry["taken"] for entry in books)
    shares = [m.value for m in metrics if m.name == "tailbound_owner_share_ratio"]
    assert sum(shares) == pytest.approx(1.0)
    refused = sum(m.value for m in metrics if m.name == "tailbound_packets_refused_total")
    assert refused == sum(stats["drops"].values()) > 0  # duplicates were made on purpose


def test_what_is_worth_an_alert_is_told_before_it_happens() -> None:
    """An increase from nothing to one is none to Prometheus."""
    metrics = flatten({"rank": 0, "ranks": 2, "event_counts": {"late": 2, "results_by": 1}})
    events = {m.labels["event"]: m.value for m in metrics if m.name == "tailbound_events_total"}
    assert (events["keys_tried"], events["late"], events["results_by"]) == (0, 2, 1)


def test_a_row_that_comes_after_its_op_leaves_no_counter_that_falls() -> None:
    """It was absent and is late: to Prometheus a counter that falls has begun anew, and counts twice."""
    entry = {"expected": 9, "taken": 7, "late": 0, "lost": 0, "refused": 0, "absent": 2, "repaired": 0}
    before, after = (
        by_key(flatten({"rank": 0, "ranks": 2, "peers": {"1": entry | more}}))
        for more in ({}, {"late": 2, "absent": 0})
    )
    assert all(value <= after[key] for key, value in before.items() if key[0].endswith("_total"))
    assert before != after


def test_names_and_labels_are_as_prometheus_wants_them(stats: dict[str, Any]) -> None:
    kinds: dict[str, tuple[str, tuple[str, ...]]] = {}
    for metric in flatten(stats["status"]):
        assert re.fullmatch(r"tailbound_[a-z0-9_]+", metric.name)
        assert metric.labels["rank"] == "1"
        assert metric.labels["job"] == stats["status"]["cookie"]
        assert metric.help.endswith((".", "unlimited", "measured"))
        # one help and set of labels for a name
        assert kinds.setdefault(metric.name, (metric.help, tuple(metric.labels))) == (
            metric.help, tuple(metric.labels),
        )  # fmt: skip


def test_every_name_of_the_tables_finds_its_number(stats: dict[str, Any], repository: Path) -> None:
    """A place that no status has would leave its metric out without a word. docs/torch/metrics.md names them all."""
    rows = [*flatten_module._OF_RANK, *flatten_module._OF_PEER]
    found = {metric.name for metric in flatten(stats["status"])}
    assert {f"tailbound_{name}" for name, *_ in rows} <= found
    assert {place for _, place, *_ in flatten_module._BY_KEY} <= stats["status"].keys()
    page = (repository / "docs/torch/metrics.md").read_text()
    assert [name for name in sorted(found) if name.removeprefix("tailbound") not in page] == []


def test_a_suspect_and_one_that_has_gone_are_told_apart() -> None:
    metrics = flatten({"rank": 1, "ranks": 3, "peers": {"0": {"suspect": "cr"}, "2": {"suspect": "bye"}}})
    suspect = {m.labels["peer"]: m.value for m in metrics if m.name == "tailbound_peer_suspect"}
    assert suspect == {"0": 1, "2": 0}
    assert [m.value for m in metrics if m.name == "tailbound_peer_gone"] == [0, 1]
