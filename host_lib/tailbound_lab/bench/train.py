"""``tailbound bench train``: the same training with every way to average, in turns of a few steps in one lab.

Scenarios (``train_plan``): ``compute``, where backward takes longer than communication, against steps that do not
communicate; ``communication``, where 101 MB of gradients cross cables of 1 Gbit/s; ``accuracy``, the demo's model after
equal epochs under losses; ``tails-gpt`` and ``tails-conv``, time to the loss of plain DDP (``to_loss``) under foreign
bursts. All variants train in the same processes on the same batches from the same weights.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tailbound.errors import CapabilityError, ConfigError
from tailbound.prepare import Preparation
from tailbound_lab.bench import picture, to_loss
from tailbound_lab.bench.allreduce import conditions
from tailbound_lab.bench.places import Loopback, Place, datapath_at, open_place
from tailbound_lab.bench.save import save
from tailbound_lab.bench.start import StartLine
from tailbound_lab.bench.tail import PLACEHOLDER, aims_table, calibrated, crew_in_lab
from tailbound_lab.bench.team import Team
from tailbound_lab.bench.train_plan import Scenario
from tailbound_lab.bench.train_plot import draw
from tailbound_lab.bench.train_rows import Record, aims, row, table
from tailbound_lab.lab.spec import Background, LabSpec

_WORKER = "tailbound_lab.bench.train_worker"
#: Seconds that a rank waits for another one at the start of a turn, and the whole run for any report: under losses a
#: step over TCP takes as long as its retransmission timer wants.
_PATIENCE, _SILENCE = 170.0, 200.0
#: Bytes of the all-reduces of Gloo whose tail the bursts set: a bucket of DDP.
_CALIBRATED_ON = 25 << 20


def run(
    scenarios: Sequence[Scenario],
    *,
    datapath: str = "auto",
    options: Mapping[str, Any] | None = None,
    lab_only: bool = False,
    json_file: Path | None = None,
    plot: Path | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Trains, prints tables, writes ``json_file`` after every seed and the plot at the end; returns the rows.

    Args:
        scenarios: of ``train_plan.plan``.
        datapath: ``auto``, ``xdp`` or ``udp``.
        options: of ``TailboundState``, beside the datapath.
        lab_only: without root, refuse instead of training on loopback without rates and losses.
        json_file: where the rows go.
        plot: where the picture goes; None: beside ``json_file``, if there is one.
        console: where tables and progress go.

    Raises:
        ConfigError, CapabilityError: what is asked for cannot be had here, or an extra is missing.
        TransportError: a worker failed.
    """
    console = console or Console()
    if not scenarios:
        raise ConfigError("give at least one scenario")
    try:
        from tailbound_lab.bench import digits, text
        from tailbound_lab.bench.trainee import MALLOC
    except ModuleNotFoundError as error:
        raise CapabilityError(f"training needs {error.name}: pip install 'tailbound-lab[demo]'") from error
    plot = picture.where(plot, json_file, console)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tailbound-bench-") as name, Preparation() as preparation:
        folder = Path(name)
        console.print("preparing: the data, and machine code that is not in the cache yet", highlight=False)
        sources = {"digits": digits.load, "text": text.load}
        for data, seed in {(scenario.data, seed) for scenario in scenarios for seed in scenario.seeds}:
            digits.save(sources[data](seed), folder / f"{data}{seed}.npz")
        preparation.wait()
        bursts = _bursts(scenarios, folder, console)
        for scenario in scenarios:
            for loss, tail in product(scenario.losses, scenario.tails):
                if not scenario.variants_at(loss):  # all that is asked for was trained at the first loss
                    continue
                background = bursts[scenario.workers, scenario.rate, tail]
                with _place(scenario, loss, background, datapath, lab_only, console) as (place, why_not):
                    if place is None:
                        continue
                    settings = conditions(place.spec, why_not is None) | {
                        "cpus": os.cpu_count() or 1, "tail": tail, "background": background and str(background),
                    }  # fmt: skip
                    StartLine.create(folder / "start", scenario.workers)
                    job = dataclasses.asdict(scenario) | {
                        "folder": name, "variants": scenario.variants_at(loss), "patience": _PATIENCE,
                        "options": dict(options or {}), "datapath": datapath_at(place, datapath),
                    }  # fmt: skip
                    with Team(place, _WORKER, job, console, env=MALLOC, silence=_SILENCE) as team:
                        for new in _follow(team, scenario, job["variants"], settings, console):
                            rows += new
                            console.print(table(new))
                            save(rows, json_file)
                        team.finish()
    arrivals = to_loss.arrivals(rows)
    if arrivals:
        console.print(to_loss.table(arrivals))
    if found := aims(rows) + to_loss.aims(arrivals):
        console.print(aims_table(found))
    picture.write(draw, rows, plot, console)
    return rows


def _bursts(
    scenarios: Sequence[Scenario], folder: Path, console: Console
) -> dict[tuple[int, int | None, float | None], Background | None]:
    """Foreign bursts by ranks, rate and tail; those of a network are found once for all scenarios.

    Raises:
        CapabilityError: there can be no lab.
    """
    found: dict[tuple[int, int | None, float | None], Background | None] = {}
    for scenario in scenarios:
        network = scenario.workers, scenario.rate
        for tail in scenario.tails:
            if tail is None:
                found[(*network, tail)] = None
        missing = [tail for tail in scenario.tails if (*network, tail) not in found]
        if missing:
            console.print("bursts: set by Gloo's all-reduces of 25 MiB", highlight=False)
            spec = LabSpec(scenario.workers, rate=scenario.rate, seed=scenario.seeds[0], background=PLACEHOLDER)
            with crew_in_lab(spec, _CALIBRATED_ON, "udp", folder, console) as (lab, crew):
                for tail in missing:
                    assert tail is not None
                    found[(*network, tail)] = calibrated(tail, lab, crew, scenario.calibration, console)[0]
    return found


@contextmanager
def _place(
    scenario: Scenario, loss: float, background: Background | None, datapath: str, lab_only: bool, console: Console
) -> Iterator[tuple[Place | None, str | None]]:
    """Where to train, and why it is not a lab (None: it is); no place where losses cannot be had.

    Raises:
        CapabilityError: there can be no lab, and nothing else will do.
    """
    spec = LabSpec(scenario.workers, rate=scenario.rate, loss=loss, seed=scenario.seeds[0], background=background)
    with ExitStack() as stack:
        place: Place | None = None
        try:
            place, why_not = stack.enter_context(open_place(spec, datapath))
        except CapabilityError as error:
            if lab_only or datapath == "xdp" or background is not None:
                raise
            why_not = str(error)
            if loss:
                console.print(f"{scenario.name}, loss {loss:.1%}: left out, {why_not}", highlight=False, soft_wrap=True)
            else:
                place = stack.enter_context(Loopback(LabSpec(scenario.workers)))
        if place is not None and why_not is not None:
            console.print(
                f"{scenario.name}: no lab, ranks train on loopback over udp without rates: {why_not}",
                highlight=False,
                soft_wrap=True,
            )
        yield place, why_not


def _follow(
    team: Team, scenario: Scenario, variants: Sequence[str], settings: Mapping[str, Any], console: Console
) -> Iterator[list[dict[str, Any]]]:
    """Shows progress; yields the rows of every seed as soon as it is over."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    for seed in scenario.seeds:
        records = {name: Record() for name in variants}
        turns: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
        ends: dict[int, dict[str, Any]] = {}
        trouble = f"tail {settings['tail']:g}" if settings["tail"] else f"loss {settings['loss']:.1%}"
        where = f"{scenario.name}, {trouble}, seed {seed}"
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            tasks = {name: progress.add_task(f"{name:>9}", total=scenario.steps) for name in variants}
            if not console.is_terminal:
                console.print(f"{where}: {scenario.steps} steps of {', '.join(variants)}", highlight=False)
            while len(ends) < team.ranks:
                rank, message = team.next()
                if message["kind"] == "seed":
                    ends[rank] = message
                elif message["kind"] == "turn":
                    name = message["name"]
                    turn = turns.setdefault((name, message["number"]), {})
                    turn[rank] = message
                    if len(turn) == team.ranks:
                        record = records[name]
                        record.add([turn[each] for each in range(team.ranks)])
                        del turns[name, message["number"]]
                        progress.update(tasks[name], completed=len(record.curve.iterations))
        last = [ends[rank] for rank in range(team.ranks)]
        yield [row(name, records[name], last, scenario, seed, settings) for name in variants]
