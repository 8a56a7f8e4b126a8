"""The demo's pure parts: the balance of packets, curves and figures, data and batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tailbound_lab.bench.train_rows import Record
from tailbound_lab.demo import show
from tailbound_lab.demo.ledger import balance
from tailbound_lab.demo.run import drift, figures, grown, lossy_network


def stats(sent: int, verdicts: dict[str, int], drops: dict[str, int]) -> dict[str, Any]:
    """One rank of two, as ``report.snapshot`` has it; ``verdicts`` there include the drops."""
    return {"sent": {"0": {"packets": sent}}, "verdicts": {**verdicts, **drops}, "drops": drops}


RANKS = [
    stats(100, {"STORED": 40, "ADDED": 30, "RESULT_TAKEN": 15, "CONTROL_PASSED": 5}, {"LATE": 2, "DUPLICATE": 1}),
    stats(90, {"STORED": 60, "RESULT_TAKEN": 33, "CONTROL_PASSED": 2}, {}),
]


def test_every_packet_has_gone_somewhere() -> None:
    whole = balance(RANKS, lost_on_purpose=4, duplicated=6, lost_in_queues=3, socket_drops=1)
    assert (whole.sent, whole.taken, whole.dropped) == (190, 185, 3)
    assert whole.difference == 0
    assert whole.balanced
    assert whole.as_dict()["balanced"] is True


@pytest.mark.parametrize(
    ("change", "difference"),
    [({"lost_on_purpose": 3}, 1), ({"lost_on_purpose": 6}, -2), ({"duplicated": 7}, 1), ({"lost_in_queues": 2}, 1)],
)
def test_a_packet_too_many_or_too_few_shows(change: dict[str, int], difference: int) -> None:
    right = {"lost_on_purpose": 4, "duplicated": 6, "lost_in_queues": 3, "socket_drops": 1}
    whole = balance(RANKS, **(right | change))
    assert whole.difference == difference
    assert not whole.balanced


@pytest.mark.needs("torch")
def test_drops_of_a_udp_socket_are_found_by_its_port() -> None:
    from tailbound_lab.bench.course import udp_drops

    head = "sl local_address rem_address st tx_queue rx_queue tr tm->when retrnsmt uid timeout inode ref pointer drops"
    rest = "00000000:0000 07 00000000:00000000 00:00000000 00000000 0 0 19283 2 00000000"
    table = f"  {head}\n 1081: 010012C6:1CF3 {rest} 17\n 1082: 0100007F:1CF4 {rest} 5\n"
    assert udp_drops(table, 0x1CF3) == 17
    assert udp_drops(table, 0x1CF4) == 5
    assert udp_drops(table, 53) == 0


def test_the_figures_of_a_training() -> None:
    record = Record([0.3, 0.2, 0.2], [0.3, 0.4, 0.6], [(0.0, 0.1), (0.1, 0.2), (0.4, 0.9), (0.5, 0.96), (0.6, 0.94)])
    found = figures(record)
    assert (found["iter_p50_ms"], found["iter_p99_ms"], found["iter_max_ms"]) == (200, 300, 300)
    assert (found["training_s"], found["time_to_accuracy_s"], found["accuracy"]) == (0.6, 0.5, 0.94)
    assert found["settled_accuracy"] == pytest.approx((0.9 + 0.96 + 0.94) / 3)


def test_counters_are_those_since_the_warm_up_of_all_ranks() -> None:
    warm, last = {"drops": {"a": 1, "b": 2, "d": 3}}, {"drops": {"a": 1, "b": 5, "c": 7, "d": 3}}
    assert list(grown([warm, warm], [last, last], "drops").items()) == [("c", 14), ("b", 6)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "2.8 times faster per step than Gloo, at equal accuracy (97.5% against 97.8%)"),
        ({"training_s": 30.8}, "1.1 times slower per step than Gloo, at equal accuracy (97.5% against 97.8%)"),
        ({"training_s": 28.5}, "As fast per step as Gloo, at equal accuracy (97.5% against 97.8%)"),
        ({"settled_accuracy": 0.96}, "2.8 times faster per step than Gloo, at an accuracy of 96.0% against 97.8%"),
    ],
)
def test_the_first_line_says_what_was_gained(change: dict[str, Any], words: str) -> None:
    summary = {"training_s": 10.0, "gloo_training_s": 28.0}
    summary |= {"settled_accuracy": 0.975, "gloo_settled_accuracy": 0.978}
    assert show.headline(summary | change) == words


@pytest.mark.parametrize(("bursts", "loss"), [(True, "1% of packets lost in bursts"), (False, "1% of packets lost")])
def test_the_conditions_name_rate_loss_and_straggler(bursts: bool, loss: str) -> None:
    spec = lossy_network(4, bursts=bursts)
    assert show.describe(spec) == f"cables of 1 Gbit/s, {loss}, rank 3 computes 25 ms longer in every step"


def test_drift_of_equal_replicas_is_nothing() -> None:
    one = np.array([3.0, 4.0], np.float32)
    assert drift([one, one.copy()]) == 0
    assert drift([one * np.float32(0.5), one * np.float32(1.5)]) == pytest.approx(0.5)


@pytest.mark.needs("sklearn", "torch")
def test_the_digits_are_split_and_shuffled_by_the_seed() -> None:
    from tailbound_lab.bench import digits

    data = digits.load(7)
    assert data.train_inputs.shape == (1437, 1, 8, 8)
    assert data.test_inputs.shape == (360, 1, 8, 8)
    assert (data.train_inputs.min(), data.train_inputs.max()) == (0, 1)
    assert np.bincount(data.train_labels).min() > 100
    again, other = digits.load(7), digits.load(8)
    assert (again.test_labels == data.test_labels).all()
    assert (other.test_labels != data.test_labels).any()


@pytest.mark.needs("torch")
def test_no_image_is_seen_twice_in_an_epoch() -> None:
    from tailbound_lab.bench import digits

    steps = list(digits.batches(1437, ranks=4, per_rank=16, epoch=3, seed=7))
    assert len(steps) == 22
    assert {step.shape for step in steps} == {(4, 16)}
    seen = np.concatenate([step.ravel() for step in steps])
    assert np.unique(seen).size == seen.size
    other = next(digits.batches(1437, ranks=4, per_rank=16, epoch=4, seed=7))
    assert (other != steps[0]).any()


@pytest.mark.needs("torch")
def test_the_model_fills_several_buckets_and_keeps_no_running_statistics() -> None:
    import torch

    from tailbound_lab.bench import digits

    net = digits.model(7)
    size = 4 * sum(p.numel() for p in net.parameters())
    assert 8 << 20 <= size <= 16 << 20
    assert not list(net.buffers())
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), digits.model(7).parameters(), strict=True))
