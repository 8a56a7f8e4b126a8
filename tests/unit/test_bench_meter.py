"""Processor time of an op and rank: who is charged for what, and what the kernel's share is made of."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tailbound_lab.bench import meter as metering
from tailbound_lab.bench import softirq
from tailbound_lab.bench.meter import Meter, per_op
from tailbound_lab.bench.softirq import KernelShare, helpers


class Clocks:
    """The two clocks of a process whose main thread, and whose other threads, work when they are told to."""

    def __init__(self) -> None:
        self.main = self.others = 0.0

    def thread_time(self) -> float:
        return self.main

    def process_time(self) -> float:
        return self.main + self.others


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr(metering, "time", made)
    return made


def test_whose_turn_it_is_pays_for_other_threads_and_for_ops(clocks: Clocks) -> None:
    meter = Meter(kernel=False)
    clocks.others += 100  # before anybody has a turn
    for _ in range(2):
        meter.turn("a")
        clocks.main += 50  # between ops: data, comparisons
        with meter.op():
            clocks.main += 1
            clocks.others += 2
        clocks.others += 4  # answers to others
        meter.turn("b")
        with meter.op():
            clocks.main += 8
    meter.turn()
    clocks.others += 100
    assert meter.report() == [["a", 14.0, 0.0, 2], ["b", 16.0, 0.0, 2]]
    meter.forget()
    clocks.others += 100
    meter.turn()
    assert meter.report() == []


def test_an_op_costs_what_its_ranks_and_the_kernel_spent() -> None:
    entries = [["a", 0.2, 0.4, 4], ["a", 0.1, 0.0, 2], ["b", 9.0, 0.0, 1], ["c", 0.3, None, 3], ["d", 0.3, -0.01, 3]]
    found = per_op(entries, "a")
    assert (found["cpu_ms"], found["kernel_ms"]) == (pytest.approx(700 / 6), pytest.approx(400 / 6))
    assert per_op(entries, "c") == {"cpu_ms": pytest.approx(100), "kernel_ms": None}
    assert per_op(entries, "d") == {"cpu_ms": pytest.approx(100), "kernel_ms": 0.0}
    assert per_op(entries, "nobody") == {"cpu_ms": None, "kernel_ms": None}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of a machine with two processors: 10 s idle in all, threads ran for 3 s, two helpers for 1.5 s in all."""
    for pid, name, ran in ((14, "ksoftirqd/0", 1_000_000_000), (22, "napi/eth0-8193", 500_000_000), (30, "bash", 7)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "comm").write_text(f"{name}\n")
        (tmp_path / str(pid) / "schedstat").write_text(f"{ran} 99 3\n")
    (tmp_path / "runs").write_text(
        "version 15\ntimestamp 1\ncpu0 0 0 0 0 0 0 1000000000 5 6\ndomain0 3 1\ncpu1 0 0 0 0 0 0 2000000000 5 6\n"
    )
    (tmp_path / "usage").write_text("3000000000\n")
    (tmp_path / "stat").write_text("cpu  100 20 30 950 50 6 400 77 0 0\n")
    monkeypatch.setattr(softirq, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(softirq, "_RUNS", tmp_path / "runs")
    monkeypatch.setattr(softirq, "_USAGE", tmp_path / "usage")
    monkeypatch.setattr(softirq, "helpers", lambda *, apart: helpers(tmp_path, apart=apart))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(softirq, "time", SimpleNamespace(monotonic=lambda: 8.0))
    return tmp_path


@pytest.mark.parametrize(("runs", "stolen"), [("runs", 0), ("usage", 0.77)])
def test_the_kernels_share_is_its_threads_and_what_no_thread_and_no_idleness_explains(
    machine: Path, monkeypatch: pytest.MonkeyPatch, runs: str, stolen: float
) -> None:
    """What a hypervisor took is not the kernel's: it is in the threads' time, or is told beside it."""
    monkeypatch.setattr(softirq, "softirqs_apart", lambda: False)
    if runs == "usage":
        (machine / "runs").unlink()
    share = KernelShare()
    assert share.seconds() == pytest.approx(1.5 + (2 * 8 - 10 - stolen - 3))
    share.close()


def test_where_softirqs_are_apart_their_column_counts_which_has_ksoftirqd(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softirq, "softirqs_apart", lambda: True)
    share = KernelShare()
    assert share.seconds() == pytest.approx(0.5 + 4)
    share.close()
