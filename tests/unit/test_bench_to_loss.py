"""Time to the loss that plain DDP reaches: smoothing, targets, who got there and who did not; models and text."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tailbound import cli
from tailbound.errors import ConfigError
from tailbound_lab.bench.tail import PLACEHOLDER
from tailbound_lab.bench.to_loss import arrivals, first_below, lines, smoothed, target_of, window_of
from tailbound_lab.bench.train_plan import SCENARIOS, TAILED, plan
from tailbound_lab.bench.train_rows import Record, row

#: Falls by one a step.
FALLING = [float(20 - step) for step in range(20)]


def training(name: str, losses: list[float] = FALLING, *, ms: float = 100.0, **changes: Any) -> dict[str, Any]:
    return {
        "scenario": "tails-gpt", "tail": 3.0, "seed": 1, "name": name, "complete": True, "steps": len(losses),
        "step_loss": losses, "step_ms": [ms] * len(losses), "step_end_ms": [ms * (at + 1) for at in range(len(losses))],
    } | changes  # fmt: skip


def test_a_smoothed_loss_is_the_mean_of_the_steps_before() -> None:
    assert smoothed([4, 2, 3, 1], 2) == [3, 2.5, 2]
    assert smoothed([4, 2], 1) == [4, 2]
    assert smoothed([4], 2) == []
    assert (window_of(120), window_of(20), window_of(3)) == (20, 3, 1)


def test_the_first_time_below_counts_and_never_is_none() -> None:
    assert first_below([4, 2, 3, 1], 2.5, 2) == 3
    assert first_below([4, 2, 3, 1], 2.4, 2) == 4
    assert first_below([4, 2, 3, 1], 1.9, 2) is None


def test_the_target_is_the_loss_after_three_quarters() -> None:
    assert target_of(FALLING, 1) == FALLING[14]
    assert target_of(FALLING, 3) == FALLING[13]
    assert first_below(FALLING, target_of(FALLING, 3), 3) == 15


def test_times_to_gloos_loss() -> None:
    behind = [loss + 2 for loss in FALLING]  # two steps more for the same loss
    never = [loss + 9 for loss in FALLING]
    rows = [
        training("gloo"), training("tailbound", behind, ms=50), training("powersgd", never, ms=40),
        training("gloo", tail=None), training("gloo", seed=2, complete=False), training("tailbound", seed=2),
    ]  # fmt: skip
    gloo, ours, powersgd = arrivals(rows)
    assert (gloo.seconds, gloo.over_plain, gloo.reached) == (pytest.approx(1.5), 1.0, True)
    assert (ours.seconds, ours.over_plain, ours.reached) == (pytest.approx(0.85), pytest.approx(0.85 / 1.5), True)
    # censored: it trained for 0.8 s and did not get there
    assert (powersgd.seconds, powersgd.reached) == (pytest.approx(0.8), False)
    assert [(row["who"], row["/gloo"], row["there"]) for row in lines([gloo, ours, powersgd])] == [
        ("gloo", "1.00", "1/1"), ("tailbound", "0.57", "1/1"), ("powersgd", "> 0.53", "0/1"),
    ]  # fmt: skip


def test_stalls_of_several_ranks_at_once_are_waited_for_once() -> None:
    """Both stand still for a second, in different steps: two steps are long, and both are over after 1.1 seconds."""
    rows = []
    for name, times in (("gloo", [[1.0, 1.0], [1.0, 1.0]]), ("tailbound", [[1.0, 0.1], [0.1, 1.0]])):
        record = Record()
        record.add([{
            "steps": [(0.0, seconds, 0.0) for seconds in each], "wall": sum(each), "busy": 0.0, "losses": [2.0, 1.0],
            "accuracy": None,
        } for each in times])  # fmt: skip
        settings = {"tail": 3.0, "cpus": 1}
        end = {"gradient_bytes": 8, "spent": [], "expected": 1, "delivered": 1, "deadline_hits": 0, "datapath": "udp"}
        rows.append(row(name, record, [end, end], plan(["tails-gpt"], workers=2, steps=2)[0], 1, settings))
    gloo, ours = rows
    assert ours["step_ms"] == gloo["step_ms"] == [1000, 1000]
    assert ours["step_end_ms"] == pytest.approx([1000, 1100])
    assert [each.seconds for each in arrivals(rows)] == pytest.approx([2.0, 1.1])


def test_trainings_under_bursts_only_where_asked_for() -> None:
    assert not set(TAILED) & {scenario.name for scenario in plan()}
    (gpt,) = plan(["tails-gpt"], tails=(3.0,))
    assert (gpt.tails, len(gpt.seeds), gpt.momentum) == ((3.0,), 3, None)
    assert {each.tails for each in TAILED.values()} == {(1.5, 3.0)}
    (quick,) = plan(["tails-gpt"], quick=True)
    assert (quick.steps, quick.seeds, quick.calibration) == (12, (1,), 10.0)
    for changes, words in (
        ({"tails": (1.0,)}, "above 1"), ({"rate": 0}, "give --rate"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            plan(["tails-gpt"], **changes)


def test_tails_reach_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr("tailbound_lab.bench.train.run", lambda scenarios, **more: seen.update(scenarios=scenarios))
    assert cli.main(["bench", "train", "--scenario", "tails-conv", "--tail", "2"]) == 0
    assert [scenario.tails for scenario in seen["scenarios"]] == [(2.0,)]


@pytest.mark.needs("torch", "sklearn")
def test_bursts_of_a_network_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    from tailbound_lab.bench import train

    asked: list[float] = []

    def calibrated(tail: float, *_: Any) -> tuple[Any, list[Any]]:
        asked.append(tail)
        return PLACEHOLDER, []

    monkeypatch.setattr(train, "in_lab", lambda *_: nullcontext(SimpleNamespace(calibrated=calibrated)))
    console = Console(file=io.StringIO())
    both = train._bursts([*plan(), *plan(list(TAILED))], console)
    assert asked == [1.5, 3.0]
    assert both[4, 10**9, 3.0] is PLACEHOLDER
    assert {both[s.workers, s.rate, None] for s in SCENARIOS.values()} == {None}


@pytest.mark.needs("torch")
def test_the_text_is_cut_by_a_seed_and_each_character_is_followed_by_its_label() -> None:
    from tailbound_lab.bench import text

    one, other = text.load(1), text.load(2)
    assert one.train_inputs.shape == one.train_labels.shape == (16384, text.LENGTH)
    assert one.test_inputs.shape == (64, text.LENGTH)
    assert np.array_equal(one.train_inputs[:, 1:], one.train_labels[:, :-1])
    assert 0 <= one.train_inputs.min() <= one.train_inputs.max() < text.CHARACTERS
    assert np.array_equal(one.test_inputs, text.load(1).test_inputs)
    assert not np.array_equal(one.test_inputs, other.test_inputs)


@pytest.mark.needs("torch")
def test_a_small_gpt_learns_does_not_look_ahead_and_is_left_alone_while_frozen() -> None:
    import torch

    from tailbound_lab.bench import text
    from tailbound_lab.bench.gpt import GPT, Size
    from tailbound_lab.bench.nets import NETS
    from tailbound_lab.bench.trainee import Trainee

    torch.set_num_threads(1)
    data = text.load(1)
    inputs, labels = torch.from_numpy(data.train_inputs), torch.from_numpy(data.train_labels)
    small = GPT(Size(4, 4, 64), 1)
    assert not list(small.buffers())
    trainee = Trainee(small, lambda net, _: (net, None), rate=3e-3, momentum=None)
    ahead = inputs[:1].clone()
    ahead[0, 20:] = 65
    with torch.no_grad():
        one, other = trainee.net(inputs[:1]), trainee.net(ahead)
    assert one.shape == (1, text.CHARACTERS, text.LENGTH)
    assert torch.allclose(one[:, :, :20], other[:, :, :20], atol=1e-5)
    assert not torch.allclose(one[:, :, 20:], other[:, :, 20:], atol=1e-5)
    before = trainee.weights()
    with trainee.frozen():
        trainee.step(inputs[:4], labels[:4])
    assert np.array_equal(trainee.weights(), before)
    first = trainee.loss
    for at in range(20):
        trainee.step(inputs[16 * at : 16 * at + 16], labels[16 * at : 16 * at + 16])
    assert trainee.loss < first - 1
    assert 0 < trainee.accuracy(inputs[:8], labels[:8]) < 1
    assert 10e6 < sum(p.numel() for p in NETS["gpt"](1).parameters()) < 11e6


@pytest.mark.needs("matplotlib")
def test_the_picture_has_a_panel_for_each_tail(tmp_path: Path) -> None:
    from tailbound_lab.bench.train_plot import draw

    rows = [training(name, tail=tail, loss=0.0) for name in ("gloo", "tailbound") for tail in (1.5, 3.0)]
    for number, chosen in enumerate((rows, rows[1::2])):
        draw(chosen, tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").read_bytes().startswith(b"\x89PNG")
