"""The training benchmark's pure parts: scenarios and changes to them, records, rows, options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailbound import cli
from tailbound.errors import ConfigError
from tailbound_lab.bench.softirq import busy_seconds
from tailbound_lab.bench.train_plan import IMAGES, Scenario, plan
from tailbound_lab.bench.train_rows import Record, Turns, row
from tailbound_lab.lab.spec import LabSpec


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers": 1}, "at least 2 workers"),
        ({"workers": 100, "batch": 100}, f"{IMAGES} images"),
        ({"losses": (1.5,)}, "loss 1.5"),
        ({"rate": 5}, "rate 5"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(**changes)


def test_tcp_is_trained_at_the_first_loss_only() -> None:
    (scenario,) = plan(["accuracy"], variants=("tailbound", "gloo"))
    assert scenario.variants_at(0.0) == ("gloo", "tailbound")
    assert scenario.variants_at(0.05) == ("tailbound",)
    (scenario,) = plan(["accuracy"], losses=(0.05,))
    assert scenario.variants_at(0.05) == ("gloo", "fp16", "powersgd", "tailbound")


def report(steps: list[float], **values: Any) -> dict[str, Any]:
    found = {"steps": steps, "wall": sum(steps), "busy": 0.4, "losses": [2.0] * len(steps), "accuracy": None}
    return found | values


def record() -> Record:
    """Two ranks, a look before anything, three steps in two turns."""
    found = Record()
    found.add([report([], accuracy=0.1), report([], accuracy=0.2)])
    found.add([report([0.4, 0.2]), report([0.5, 0.1])])
    found.add([report([0.3], accuracy=0.96), report([0.2], wall=0.5, accuracy=0.97)])
    return found


def test_a_record_has_the_time_of_the_last_rank_and_the_accuracy_of_the_worst_replica() -> None:
    found = record()
    assert found.iterations == pytest.approx([0.5, 0.2, 0.3])
    assert [accuracy for _, accuracy in found.points] == [0.1, 0.96]
    assert found.ends == pytest.approx([0.5, 0.6, 0.9])
    assert found.points[1][0] == pytest.approx(0.9)
    assert found.wall == pytest.approx(0.6 + 0.5)
    assert found.busy == pytest.approx(1.2)


SETTINGS = {"loss": 0.0, "rate": 10**9, "wire": False, "cpus": 2, "tail": None}
END = {
    "gradient_bytes": 8_000_000, "expected": 100, "delivered": 99, "deadline_hits": 1, "datapath": "xdp",
    "spent": [["tailbound", 0.9, 0.3, 3], ["gloo", 0.6, None, 3]],
}  # fmt: skip
THEIR_END = {"gradient_bytes": 8, "spent": END["spent"]}


def scenario(**changes: Any) -> Scenario:
    return plan(workers=2, steps=3, **changes)[0]


def test_a_turn_counts_when_all_ranks_have_reported_it() -> None:
    turns = Turns(("gloo", "tailbound"), 2)
    turn = {"kind": "turn", "name": "gloo", "number": 0} | report([0.3], accuracy=0.5)
    assert turns.add(1, turn) is None
    assert turns.add(0, {"kind": "begun"}) is None
    assert turns.add(0, turn) == "gloo"
    assert turns.records["gloo"].points == [(pytest.approx(0.3), 0.5)]
    assert turns.records["tailbound"].iterations == []
    assert (turns.records["gloo"].time_to(0.5), turns.records["gloo"].time_to(0.6)) == (pytest.approx(0.3), None)


def test_a_row_has_what_was_asked_for() -> None:
    found = row("tailbound", record(), [END, END], scenario(), 7, SETTINGS)
    assert found["steps_per_s"] == pytest.approx(3 / 1.1)
    assert (found["step_p50_ms"], found["step_p99_ms"]) == (pytest.approx(300), pytest.approx(500))
    assert [found[name] for name in ("name", "workers", "rate", "loss")] == ["tailbound", 2, 10**9, 0.0]
    assert (found["accuracy"], found["seed"], found["datapath"], found["complete"]) == (0.96, 7, "xdp", True)
    assert (found["delivered"], found["deadline_hits"]) == (0.99, 2)
    assert found["busy"] == pytest.approx(1.2 / 1.1 / 2)
    assert found["step_loss"] == [2.0, 2.0, 2.0]
    assert found["step_end_ms"] == pytest.approx([500, 600, 900])
    assert (found["cpu_ms"], found["kernel_ms"]) == (pytest.approx(400), pytest.approx(100))
    theirs = row("gloo", record(), [THEIR_END] * 2, scenario(), 7, SETTINGS)
    assert (theirs["datapath"], theirs["delivered"], theirs["deadline_hits"]) == ("tcp", 1.0, 0)
    assert (theirs["cpu_ms"], theirs["kernel_ms"]) == (pytest.approx(200), None)
    cut = row("gloo", record(), [THEIR_END] * 2, scenario(seconds=1.0, batch=5), 7, SETTINGS)
    assert cut["complete"]
    assert not row("gloo", record(), [THEIR_END] * 2, plan()[0], 7, SETTINGS)["complete"]


def test_the_machine_gets_busier(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  100 20 30 9999 50 6 4 77 0 0\ncpu0 1 2 3\n")
    assert busy_seconds(tmp_path / "stat") == pytest.approx(160 / 100)


def test_arguments_reach_the_benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    target = "tailbound_lab.bench.train.run"
    monkeypatch.setattr(target, lambda scenarios, **more: seen.update(more, scenarios=scenarios))
    network = ["--scenario", "accuracy", "-n", "2", "--loss", "0", "--loss", "1%"]
    training = ["--seeds", "2", "--steps", "44", "--variants", "gloo", "--option", "result=peers"]
    assert cli.main(["bench", "train", *network, *training]) == 0
    (scenario,) = seen["scenarios"]
    assert (scenario.workers, scenario.losses, scenario.seeds) == (2, (0.0, 0.01), (1, 2))
    assert (scenario.variants, scenario.steps) == (("gloo",), 44)
    assert seen["options"] == {"advanced": {"result": "peers"}}
    assert cli.main(["bench", "train"]) == 0
    assert seen["scenarios"] == plan()
    assert seen["json_file"] is None
    assert cli.main(["bench", "train", "--rate", "none"]) == 0
    assert LabSpec(4, rate=seen["scenarios"][0].rate).rate is None
