"""``tailbound bench drops``: which packets are lost, trainings without them, and the model of cutting the tail."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tailbound import cli
from tailbound.errors import ConfigError
from tailbound_lab.bench import cut, drops
from tailbound_lab.bench.drops_plan import SPREAD, plan
from tailbound_lab.bench.losses import BURST, PATTERNS, Pattern, lost, rates
from tailbound_lab.lab.spec import Background

ONE = SPREAD[2]


def test_the_share_is_that_of_all_packets_whatever_the_pattern() -> None:
    assert [pattern.name for pattern in SPREAD] == [
        "uniform", "bursts", "one rank", "first half", "second half",
    ]  # fmt: skip
    for pattern in SPREAD:
        first, second = rates(pattern, 0.1, 4)
        assert sum(first) + sum(second) == pytest.approx(8 * 0.1)
    assert rates(ONE, 0.1, 4) == ([0, 0, 0, 0.4], [0, 0, 0, 0.4])
    assert rates(PATTERNS[2], 0.1, 4) == ([0.2] * 4, [0.0] * 4)
    assert rates(PATTERNS[3], 0.1, 4) == ([0.0] * 4, [0.2] * 4)


def test_four_fifths_can_be_lost_one_by_one_and_not_in_short_bursts() -> None:
    assert lost(np.random.default_rng(1), 4, 5000, 0.8).mean() == pytest.approx(0.8, abs=0.02)
    with pytest.raises(ValueError, match="cannot lose"):
        lost(np.random.default_rng(1), 4, 50, 0.8, 2)


def test_nothing_lost_is_trained_once_and_every_pattern_at_every_share() -> None:
    cases = plan(("conv",), (0.01, 0.2), 2)
    assert len(cases) == len(set(cases)) == 2 * 2 * (1 + 2 * 5)
    assert {case.pattern.name for case in cases if not case.share} == {"uniform"}
    for shares in ((0.0,), (0.3,)):
        with pytest.raises(ConfigError, match="above 0"):
            plan(("conv",), shares, 1)


@pytest.mark.needs("torch", "sklearn")
def test_replicas_stay_equal_until_results_are_lost() -> None:
    from tailbound_lab.bench.drops_train import train

    first = train("conv", PATTERNS[2], 0.1, rotate=True, seed=1, steps=3)
    assert (first["drift"], first["pattern"], len(first["step_loss"])) == (0.0, "first half", 3)
    second = train("conv", PATTERNS[3], 0.1, rotate=True, seed=1, steps=3)
    assert second["drift"] > 0
    assert second["step_loss"][0] == first["step_loss"][0]  # the same data and weights
    assert second == train("conv", PATTERNS[3], 0.1, rotate=True, seed=1, steps=3)


@pytest.mark.needs("torch")
def test_rows_that_are_lost_are_those_of_the_pattern() -> None:
    from tailbound_lab.bench.drops_train import Dropped

    gradients = [np.random.default_rng(rank).standard_normal(200_000).astype(np.float32) for rank in range(4)]
    exact = np.mean(gradients, axis=0)

    def errors(pattern: Pattern, share: float, rotate: bool) -> list[float]:
        means = Dropped(200_000, pattern, share, rotate=rotate, seed=3).means(gradients)
        return [float(((mean - exact) ** 2).sum() / (exact**2).sum()) for mean in means]

    assert max(errors(PATTERNS[0], 0.0, True)) < 1e-3
    one = errors(ONE, 0.2, True)
    assert one[3] > 3 * max(one[:3]) > 0
    assert max(errors(Pattern("bursts", burst=BURST), 0.2, False)) > 0.05


# -- the model of cutting the tail ------------------------------------------------------------------------------------


def test_a_stream_takes_ten_times_as_long_within_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    bursts = [(2.0, 10.0), (100.0, 1.0)]
    monkeypatch.setattr(cut, "schedule", lambda *_: iter(bursts))
    link = cut._Link(Background(10**9, 1, 1), 0)
    assert link.stream(0.0, 1.0, 99.0) == (1.0, 0.0)
    when, left = link.stream(1.0, 1.5, 99.0)  # one second of it, then half a second's worth at a tenth
    assert (when, left) == (pytest.approx(7.0), 0.0)
    when, left = link.stream(7.0, 1.0, 12.0)
    assert (when, left) == (pytest.approx(12.0), pytest.approx(0.5))
    assert link.stream(12.0, 0.5, 99.0) == (12.5, 0.0)


def test_bursts_make_the_tail_that_was_asked_for_and_a_deadline_ends_it() -> None:
    whole, missing = cut.run(cut.bursts(3.0), cut.Cut())
    assert missing == 0
    assert 2.7 < np.percentile(whole, 99, method="inverted_cdf") / np.median(whole) < 3.3
    bounded, missing = cut.run(cut.bursts(3.0), cut.Cut(patience=cut.HALF))
    assert max(bounded) == pytest.approx(2 * cut.HALF)
    assert 0 < missing < 0.1
    (row,) = cut.rows((3.0,), (cut.Cut(share=0.2),))
    assert row["lost"] == pytest.approx(0.2)
    assert row["mean"] > 1.2


def trained(model: str, pattern: str, share: float, rotated: bool) -> dict[str, Any]:
    return {
        "kind": "training", "model": model, "pattern": pattern, "share": share, "rotated": rotated, "seed": 1,
        "steps": 3, "loss": 1.0, "test_loss": 1.25 + share, "accuracy": 0.5, "drift": 0.0, "step_loss": [1.0],
    }  # fmt: skip


@pytest.mark.needs("matplotlib", "sklearn")
def test_rows_tables_and_a_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        drops, "_trained", lambda cases, *_: [trained(c.model, c.pattern.name, c.share, c.rotate) for c in cases]
    )
    said, file = io.StringIO(), tmp_path / "drops.json"
    rows = drops.run(shares=(0.2,), seeds=1, json_file=file, console=Console(file=said, width=80))
    assert json.loads(file.read_text()) == rows
    assert "1.450" in said.getvalue()
    assert "…" not in said.getvalue()
    assert (tmp_path / "drops.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
@pytest.mark.needs("torch", "sklearn", "matplotlib")
def test_trainings_in_processes_of_their_own(tmp_path: Path) -> None:
    rows = drops.run(models=("conv",), shares=(0.2,), seeds=1, steps=2, console=Console(file=io.StringIO()))
    assert [row["share"] for row in rows if row["kind"] == "training"] == [0.0] * 2 + [0.2] * 10


def test_arguments_reach_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr("tailbound_lab.bench.drops.run", lambda **settings: seen.update(settings))
    assert cli.main(["bench", "drops", "--share", "10%", "--model", "conv", "--seeds", "3"]) == 0
    assert (seen["shares"], seen["models"], seen["seeds"], seen["steps"]) == ((0.1,), ("conv",), 3, 0)
    assert cli.main(["bench", "drops", "--quick"]) == 0
    assert (seen["shares"], seen["seeds"], seen["steps"]) == ((0.2,), 1, 24)
