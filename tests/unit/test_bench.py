"""What benchmarks and the demo make of what they have measured: rows, figures, processor time; and how they are asked.

``test_bench_workers`` has the processes that measure.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tailbound import cli
from tailbound.errors import ConfigError
from tailbound_lab.bench import allreduce, calibrate, codec, figures, softirq
from tailbound_lab.bench import meter as metering
from tailbound_lab.bench.experiment import Phase, conditions, rows_of
from tailbound_lab.bench.link import link_bytes
from tailbound_lab.bench.meter import Meter, per_op
from tailbound_lab.bench.softirq import KernelShare, helpers
from tailbound_lab.bench.to_loss import arrivals, first_below, lines, smoothed, target_of
from tailbound_lab.bench.train_plan import IMAGES, plan
from tailbound_lab.bench.train_rows import Record, row
from tailbound_lab.demo.ledger import balance
from tailbound_lab.lab.spec import Background, Burst, LabSpec, Straggler

approx = pytest.approx


@pytest.mark.parametrize(
    ("run", "wrong", "words"),
    [
        (plan, {"workers": 1}, "at least 2 workers"),
        (plan, {"workers": 100, "batch": 100}, f"{IMAGES} images"),
        (plan, {"losses": (1.5,)}, "loss 1.5"),
        (plan, {"rate": 5}, "rate 5"),
        (allreduce.run, {"spec": LabSpec(2, straggler=Straggler(1, 40.0, None))}, "give RANK:MS:EVERY, such as 1:40"),
        (allreduce.run, {"spec": LabSpec(2), "iters": 0}, "at least one"),
        (allreduce.run, {"spec": LabSpec(2), "sizes": ()}, "at least one"),
        (allreduce.run, {"spec": LabSpec(2), "sizes": (4,)}, "at least one"),
    ],
)
def test_what_cannot_be_measured_is_refused(run: Callable[..., Any], wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(**wrong)


# -- all-reduces -----------------------------------------------------------------------------------------------------

ABOUT = conditions(LabSpec(2, burst=Burst(0.01, 8), wire=True)) | {"datapath": "xdp"}


def phase() -> Phase:
    def report(rank: int, **counted: int) -> dict[str, Any]:
        return {
            "rank": rank,
            "counted": {"expected": 100, "delivered": 100, "deadline_hits": 0, "link_bytes": 6_000_000} | counted,
            "nmse": {"tailbound": [1e-3, 3e-3], "gloo": [1e-14]},
            "spent": [["tailbound", 0.05, 0.02 if rank == 0 else 0.0, 1], ["gloo", 0.1, None, 1]],
        }

    times = {"tailbound": [[0.1, 0.3], [0.2, 0.1]], "gloo": [[0.5], [0.7]]}
    return Phase(times, [report(0, delivered=99, deadline_hits=2), report(1)])


@pytest.mark.parametrize(("percent", "value"), [(1, 15), (20, 15), (21, 20), (50, 35), (99, 50), (100, 50)])
def test_percentiles_are_of_the_nearest_rank(percent: int, value: int) -> None:
    assert figures.percentile([50, 15, 40, 35, 20], percent) == value


def test_the_bytes_of_a_link_are_those_of_both_ways(tmp_path: Path) -> None:
    dev = tmp_path / "dev"
    rows = (("lo", 100, 100), ("data0", 4_000_000, 1_000_000))
    dev.write_text("".join(f" {name}: {took} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0\n" for name, took, sent in rows))
    assert (link_bytes("data0", dev), link_bytes("data1", dev)) == (5_000_000, None)


def test_rows_are_made_of_the_slowest_ranks_and_of_counts_of_all() -> None:
    ours, theirs = rows_of(phase(), 4_000_000, ABOUT)
    assert ours == ours | {
        "workers": 2, "bytes": 4_000_000, "iters": 2, "p50_ms": 200, "max_ms": 300, "mean_ms": approx(250),
        "tail": approx(1.5), "delivered": 199 / 200, "deadline_hits": 2, "nmse": approx(2e-3), "cpu_ms": approx(60),
        "kernel_ms": approx(10), "link_bytes_per_op": 3_000_000, "burst_loss": {"loss": 0.01, "length": 8},
    }  # fmt: skip
    assert theirs == theirs | {
        "cpu_ms": approx(100), "kernel_ms": None, "link_bytes_per_op": None, "delivered": 1.0, "ratio_p50": approx(3.5),
    }  # fmt: skip
    (one, _) = rows_of(phase(), 8, ABOUT, without=0)
    assert one == one | {"delivered": 1.0, "deadline_hits": 0, "max_ms": 200}


# -- the search for a background of the tail benchmark ---------------------------------------------------------------


def model(background: Background, p50: float, slope: float, seed: int = 1) -> list[float]:
    """Iterations of which a tenth is hit by a burst and takes ``slope`` times its length longer."""
    generator = random.Random(seed)
    return [
        p50 * generator.uniform(0.99, 1.01)
        + (slope * background.on_ms / 1e3 * generator.uniform(0.9, 1.1) if generator.random() < 0.1 else 0)
        for _ in range(200)
    ]


@pytest.mark.parametrize("target", [1.5, 3.0])
@pytest.mark.parametrize("slope", [0.2, 0.9, 2.5])
def test_the_search_finds_the_background(target: float, slope: float) -> None:
    first = calibrate.guess(target, 0.35, 4, 10**9, 60)
    found, tried = calibrate.search(target, first, lambda b: model(b, 0.35, slope))
    assert calibrate.tail(model(found, 0.35, slope, seed=2)) == approx(target, rel=0.1)
    assert 1 <= len(tried) <= 4
    assert tried[0][0] == first.on_ms
    assert found.off_ms == first.off_ms


# -- processor time --------------------------------------------------------------------------------------------------


def test_whose_turn_it_is_pays_for_other_threads_and_for_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = SimpleNamespace(main=0.0, others=0.0, thread_time=lambda: clocks.main)
    clocks.process_time = lambda: clocks.main + clocks.others
    monkeypatch.setattr(metering, "time", clocks)
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


@pytest.mark.parametrize(
    ("name", "cpu", "kernel"), [("a", 700 / 6, 400 / 6), ("c", 100, None), ("d", 100, 0.0), ("nobody", None, None)]
)
def test_an_op_costs_what_its_ranks_and_the_kernel_spent(name: str, cpu: float | None, kernel: float | None) -> None:
    entries = [["a", 0.2, 0.4, 4], ["a", 0.1, 0.0, 2], ["b", 9.0, 0.0, 1], ["c", 0.3, None, 3], ["d", 0.3, -0.01, 3]]
    assert per_op(entries, name) == {"cpu_ms": approx(cpu), "kernel_ms": approx(kernel)}


@pytest.mark.parametrize(
    ("apart", "runs", "seconds"),
    [(False, True, 1.5 + (2 * 8 - 10 - 3)), (False, False, 1.5 + (2 * 8 - 10 - 0.77 - 3)), (True, True, 0.5 + 4)],
    ids=["threads and stolen time in one file", "stolen time beside it", "softirqs apart"],
)
def test_the_kernels_share_is_its_threads_and_what_no_thread_and_no_idleness_explains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool, runs: bool, seconds: float
) -> None:
    """Of two processors: 10 s idle in all, threads ran for 3 s, two helpers for 1.5 s in all.

    What a hypervisor took is not the kernel's. Where softirqs are apart, their column counts; it has ksoftirqd.
    """
    for pid, name, ran in ((14, "ksoftirqd/0", 1_000_000_000), (22, "napi/eth0-8193", 500_000_000), (30, "bash", 7)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "comm").write_text(f"{name}\n")
        (tmp_path / str(pid) / "schedstat").write_text(f"{ran} 99 3\n")
    if runs:
        (tmp_path / "runs").write_text(
            "version 15\ncpu0 0 0 0 0 0 0 1000000000 5 6\ndomain0 3 1\ncpu1 0 0 0 0 0 0 2000000000 5 6\n"
        )
    (tmp_path / "usage").write_text("3000000000\n")
    (tmp_path / "stat").write_text("cpu  100 20 30 950 50 6 400 77 0 0\ncpu0 1 2 3\n")
    for name in ("stat", "runs", "usage"):
        monkeypatch.setattr(softirq, f"_{name.upper()}", tmp_path / name)
    monkeypatch.setattr(softirq, "helpers", lambda *, apart: helpers(tmp_path, apart=apart))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(softirq, "time", SimpleNamespace(monotonic=lambda: 8.0))
    monkeypatch.setattr(softirq, "softirqs_apart", lambda: apart)
    share = KernelShare()
    assert share.seconds() == approx(seconds)
    share.close()


# -- errors of the codec ---------------------------------------------------------------------------------------------


def test_the_worst_tensor_is_told_beside_the_error_of_all() -> None:
    """No tensor is much worse than all together, however small it is beside its neighbours (codec-16)."""
    every = codec.errors()
    lossless = [row for row in every if row["name"] in ("rotated, 0% of results lost", "plain, 0% of results lost")]
    assert [row["nmse"] < row["worst_nmse"] < 1e-3 for row in lossless] == [True, True]


# -- trainings -------------------------------------------------------------------------------------------------------


def turn(steps: list[float], **values: Any) -> dict[str, Any]:
    """What a rank reports of its turn."""
    found = {"steps": steps, "wall": sum(steps), "busy": 0.4, "losses": [2.0] * len(steps), "accuracy": None}
    return found | values


@pytest.fixture
def record() -> Record:
    """Two ranks, a look before anything, three steps in two turns."""
    found = Record()
    found.add([turn([], accuracy=0.1), turn([], accuracy=0.2)])
    found.add([turn([0.4, 0.2]), turn([0.5, 0.1])])
    found.add([turn([0.3], accuracy=0.96), turn([0.2], wall=0.5, accuracy=0.97)])
    return found


def test_a_record_has_the_time_of_the_last_rank_and_the_accuracy_of_the_worst_replica(record: Record) -> None:
    assert record.iterations == approx([0.5, 0.2, 0.3])
    assert record.ends == approx([0.5, 0.6, 0.9])
    assert record.points == [(0, 0.1), (approx(0.9), 0.96)]
    assert (record.wall, record.busy) == (approx(0.6 + 0.5), approx(1.2))
    assert (record.time_to(0.96), record.time_to(0.97)) == (approx(0.9), None)


def test_a_row_has_what_was_asked_for(record: Record) -> None:
    settings = {"loss": 0.0, "rate": 10**9, "wire": False, "cpus": 2, "tail": None}
    their_end = {"gradient_bytes": 8, "spent": [["tailbound", 0.9, 0.3, 3], ["gloo", 0.6, None, 3]]}
    end = their_end | {"expected": 100, "delivered": 99, "deadline_hits": 1, "datapath": "xdp"}
    (few,), (many,) = plan(workers=2, steps=3), plan()
    found = row("tailbound", record, [end, end], few, 7, settings)
    assert found == found | {
        "workers": 2, "rate": 10**9, "loss": 0.0, "seed": 7, "datapath": "xdp", "complete": True,
        "steps_per_s": approx(3 / 1.1), "step_p50_ms": approx(300), "step_p99_ms": approx(500), "accuracy": 0.96,
        "delivered": 0.99, "deadline_hits": 2, "busy": approx(1.2 / 1.1 / 2), "cpu_ms": approx(400),
        "kernel_ms": approx(100), "step_loss": [2.0, 2.0, 2.0], "step_end_ms": approx([500, 600, 900]),
    }  # fmt: skip
    theirs = row("gloo", record, [their_end] * 2, few, 7, settings)
    assert theirs == theirs | {"datapath": "tcp", "delivered": 1.0, "cpu_ms": approx(200), "kernel_ms": None}
    assert not row("gloo", record, [their_end] * 2, many, 7, settings)["complete"]


def test_arguments_reach_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        "tailbound_lab.bench.train.run", lambda scenarios, **more: seen.update(more, scenarios=scenarios)
    )
    words = "--scenario accuracy -n 2 --loss 0 --loss 1% --seeds 2 --variants gloo --option result=peers"
    assert cli.main(["bench", "train", *words.split()]) == 0
    (scenario,) = seen["scenarios"]
    assert (scenario.workers, scenario.losses, scenario.seeds) == (2, (0.0, 0.01), (1, 2))
    assert scenario.variants_at(0.01) == (), "TCP is trained at the first loss only"
    assert (scenario.variants, seen["options"]) == (("gloo",), {"advanced": {"result": "peers"}})
    assert cli.main(["bench", "train"]) == 0
    assert seen["scenarios"] == plan()


#: Falls by one a step.
FALLING = [float(20 - step) for step in range(20)]


def test_the_first_time_that_the_smoothed_loss_is_below_the_target_counts() -> None:
    """A smoothed loss is the mean of the steps before; the target is the one after three quarters."""
    assert smoothed([4, 2, 3, 1], 2) == [3, 2.5, 2]
    assert (smoothed([4, 2], 1), smoothed([4], 2)) == ([4, 2], [])
    assert [first_below([4, 2, 3, 1], target, 2) for target in (2.5, 2.4, 1.9)] == [3, 4, None]
    assert (target_of(FALLING, 1), target_of(FALLING, 3)) == (FALLING[14], FALLING[13])
    assert first_below(FALLING, target_of(FALLING, 3), 3) == 15


def test_times_to_gloos_loss() -> None:
    def training(name: str, later: float = 0, *, ms: float = 100.0, **changes: Any) -> dict[str, Any]:
        """Its losses are ``later`` above those of the others."""
        losses, steps = [loss + later for loss in FALLING], len(FALLING)
        return {
            "scenario": "tails-gpt", "tail": 3.0, "seed": 1, "name": name, "complete": True, "steps": steps,
            "step_loss": losses, "step_ms": [ms] * steps, "step_end_ms": [ms * (at + 1) for at in range(steps)],
        } | changes  # fmt: skip

    rows = [
        training("gloo"),
        training("tailbound", 2, ms=50),  # two steps more for the same loss
        training("powersgd", 9, ms=40),  # never gets there
        training("gloo", tail=None),
        training("gloo", seed=2, complete=False),
        training("tailbound", seed=2),
    ]
    found = arrivals(rows)
    assert [(one.seconds, one.over_plain, one.reached) for one in found] == [
        (approx(1.5), 1.0, True),
        (approx(0.85), approx(0.85 / 1.5), True),
        (approx(0.8), approx(0.8 / 1.5), False),  # censored: it trained for 0.8 s and did not get there
    ]
    assert [(line["who"], line["/gloo"], line["there"]) for line in lines(found)] == [
        ("gloo", "1.00", "1/1"), ("tailbound", "0.57", "1/1"), ("powersgd", "> 0.53", "0/1"),
    ]  # fmt: skip


# -- the demo --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "difference"),
    [({}, 0), ({"lost_on_purpose": 3}, 1), ({"lost_on_purpose": 6}, -2), ({"duplicated": 7}, 1),
     ({"lost_in_queues": 2}, 1)],
)  # fmt: skip
def test_every_packet_has_gone_somewhere_and_one_too_many_or_too_few_shows(
    change: dict[str, int], difference: int
) -> None:
    drops = {"LATE": 2, "DUPLICATE": 1}
    taken = {"STORED": 40, "ADDED": 30, "RESULT_TAKEN": 15, "CONTROL_PASSED": 5}
    few = {"STORED": 60, "RESULT_TAKEN": 33, "CONTROL_PASSED": 2}
    ranks = [  # of two, as ``report.snapshot`` has them; verdicts there include the drops
        {"sent": {"0": {"packets": 100}}, "verdicts": taken | drops, "drops": drops},
        {"sent": {"0": {"packets": 90}}, "verdicts": few, "drops": {}},
    ]
    right = {"lost_on_purpose": 4, "duplicated": 6, "lost_in_queues": 3, "socket_drops": 1}
    whole = balance(ranks, **(right | change))
    assert (whole.sent, whole.dropped, whole.difference) == (190, 3, difference)
    assert whole.balanced == whole.as_dict()["balanced"] == (difference == 0)
