"""Metrics say what ``stats()`` says, with units and labels; Prometheus and TensorBoard give back what was put in."""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from support import MS, Team, Trouble, gradients, patient, team
from tailbound.errors import ConfigError
from tailbound.metrics.flatten import LEFT_OUT, Metric, flatten
from tailbound.metrics.tensorboard import write
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
    metrics, status = flatten(stats), stats["status"]
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
        assert one(metrics, "tailbound_peer_suspect", peer=peer, stage="results") == 0
        for stage, books in stats["ledger"].items():
            entry, where = books[peer], {"stage": stage, "peer": peer}
            expected = one(metrics, "tailbound_rows_expected_total", **where)
            taken = one(metrics, "tailbound_rows_taken_total", **where)
            missing = [m for m in metrics if m.name == "tailbound_rows_missing" and where.items() <= m.labels.items()]
            assert taken + sum(m.value for m in missing) == expected == entry["expected"] > 0
            assert taken == entry["taken"]
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
    entry = {"expected": 9, "taken": 7, "late": 0, "lost": 0, "refused": 0, "absent": 2, "repaired": 0, "duplicated": 0}
    before, after = (
        by_key(flatten({"rank": 0, "ranks": 2, "ledger": {"results": {"1": entry | more}}}))
        for more in ({}, {"late": 2, "absent": 0})
    )
    assert all(value <= after[key] for key, value in before.items() if key[0].endswith("_total"))
    assert before != after


def test_names_and_labels_are_as_prometheus_wants_them(stats: dict[str, Any]) -> None:
    kinds: dict[str, tuple[str, str, tuple[str, ...]]] = {}
    for metric in flatten(stats):
        assert re.fullmatch(r"tailbound_[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.labels["rank"] == "1"
        assert metric.labels["job"] == stats["status"]["cookie"]
        assert metric.help.endswith((".", "now", "unlimited", "measured"))
        # one kind, help and set of labels for a name
        assert kinds.setdefault(metric.name, (metric.kind, metric.help, tuple(metric.labels))) == (
            metric.kind, metric.help, tuple(metric.labels),
        )  # fmt: skip


def test_every_part_of_stats_is_exported_or_left_out_on_purpose(stats: dict[str, Any]) -> None:
    """Whatever is emptied of a part that is not left out, the list gets shorter."""
    whole = len(flatten(stats))
    told_by_others = {"suspects", "gone"}  # peer_suspect, peer_gone
    empty_here = {name for name, part in stats.items() if part in ({}, [], 0)}
    for name in stats.keys() - LEFT_OUT - told_by_others - empty_here:
        rest = {key: part for key, part in stats.items() if key != name}
        if name == "choice":
            assert stats["choice"]["clones_failed"] == {}
        else:
            assert len(flatten(rest)) < whole, name


def test_a_suspect_and_one_that_has_gone_are_told_apart(stats: dict[str, Any]) -> None:
    peers = {"0": {"suspect": "cr"}, "2": {"suspect": "bye"}}
    metrics = flatten({"rank": 1, "ranks": 3, "status": {"peers": peers}})
    suspect = {m.labels["peer"] + m.labels["stage"][0]: m.value for m in metrics if m.name == "tailbound_peer_suspect"}
    assert suspect == {"0c": 1, "0r": 1, "2c": 0, "2r": 0}
    assert [m.value for m in metrics if m.name == "tailbound_peer_gone"] == [0, 1]


def test_what_stats_gains_later_appears_by_its_path() -> None:
    later = {"bubbles": 3, "replica": {"sound": True, "stale": None, "counters": {"taken-over": 2}}, "word": "x"}
    metrics = flatten({"rank": 0, "ranks": 2, **later})
    assert {m.name: m.value for m in metrics if m.name != "tailbound_ranks"} == {
        "tailbound_bubbles": 3,
        "tailbound_replica_sound": 1,
        "tailbound_replica_counters_taken_over": 2,
    }


@pytest.mark.needs("prometheus")
def test_a_scrape_gives_what_stats_gives(job: Team) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    from tailbound.metrics import prometheus

    with prometheus.serve(job[1], 0, "127.0.0.1") as endpoint:
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics") as answer:
            text = answer.read().decode()
        expected = by_key(flatten(job[1].stats()))
    families = list(text_string_to_metric_families(text))
    samples = [sample for family in families for sample in family.samples]
    scraped = {(s.name, frozenset(s.labels.items())): s.value for s in samples}
    assert scraped.keys() == expected.keys()
    # at rest, but probes go on: whatever counts these may have moved
    moving = re.compile("sent_|rtt|rate_bytes|counter_total|refused")
    for key, value in expected.items():
        if not moving.search(key[0]):
            assert scraped[key] == pytest.approx(value), key
        else:
            assert scraped[key] >= 0
    types = {family.name: family.type for family in families}
    assert types["tailbound_rows_taken"] == "counter"
    assert types["tailbound_rows_missing"] == "gauge"
    assert types["tailbound_op_seconds"] == "gauge"


@pytest.mark.needs("prometheus")
def test_ranks_of_a_host_serve_at_ports_of_their_own(job: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    from tailbound.metrics import prometheus

    own = f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}.78"  # nobody else can have taken its ports
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("TAILBOUND_PROMETHEUS_PORT", "9464")
    with prometheus.serve(job[1], address=own) as endpoint:
        assert endpoint.port == 9465
        with pytest.raises(ConfigError, match=r"another port= .* TAILBOUND_PROMETHEUS_PORT"):
            prometheus.serve(job[1], address=own)
    monkeypatch.setenv("TAILBOUND_PROMETHEUS_PORT", "65535")
    with pytest.raises(ConfigError, match="choose a smaller TAILBOUND_PROMETHEUS_PORT"):
        prometheus.serve(job[1], address="127.0.0.1")
    monkeypatch.setenv("TAILBOUND_PROMETHEUS_PORT", "0")
    with prometheus.serve(job[1], address="127.0.0.1") as endpoint:
        assert endpoint.port > 0


class _Kept:
    """A writer that keeps what it gets."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars.append((tag, scalar_value, global_step))


def test_tags_group_by_name_and_leave_out_what_the_folder_says(stats: dict[str, Any]) -> None:
    writer = _Kept()
    assert write(writer, stats, 7, only={"tailbound_delivered_ratio", "tailbound_peer_rtt_seconds"}) == 3
    assert writer.scalars == [
        ("tailbound/delivered_ratio", stats["delivered"], 7),
        ("tailbound/peer_rtt_seconds/peer=0", pytest.approx(stats["status"]["peers"]["0"]["rtt_us"] / 1e6), 7),
        ("tailbound/peer_rtt_seconds/peer=2", pytest.approx(stats["status"]["peers"]["2"]["rtt_us"] / 1e6), 7),
    ]
