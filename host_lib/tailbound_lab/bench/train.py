"""``tailbound bench train``: the same training with every way to average, in turns of a few steps in one lab.

Scenarios (``train_plan``): ``accuracy``, the demo's model after equal steps under losses; ``tails-gpt`` and
``tails-conv``, time to the loss of plain DDP (``to_loss``) under foreign bursts. All variants train in the same
processes on the same batches from the same weights.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from tailbound.errors import CapabilityError, ConfigError
from tailbound.prepare import Preparation
from tailbound_lab.bench import table, to_loss
from tailbound_lab.bench.channel import GLOO, OURS
from tailbound_lab.bench.experiment import COURSE, Experiment, conditions, datapath_at
from tailbound_lab.bench.tail import PLACEHOLDER, in_lab
from tailbound_lab.bench.train_plan import Scenario
from tailbound_lab.bench.train_rows import COLUMNS, Turns, row, title
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.spec import Background, LabSpec

#: Bytes of the all-reduces of Gloo whose tail the bursts set: a bucket of DDP.
_CALIBRATED_ON = 25 << 20
#: Foreign bursts by ranks, rate and tail.
_Bursts = dict[tuple[int, int | None, float | None], Background | None]


def run(
    scenarios: Sequence[Scenario],
    *,
    datapath: str = "auto",
    options: Mapping[str, Any] | None = None,
    json_file: Path | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Train, print tables, write ``json_file`` after every seed; return the rows.

    Arguments are the options of the command, sizes in bytes and rates in bit/s.

    Raises:
        ConfigError, CapabilityError: what is asked for cannot be had here, or an extra is missing.
        TransportError: a worker failed.
    """
    console = console or Console()
    if not scenarios:
        raise ConfigError("give at least one scenario")
    try:
        from tailbound_lab.bench import digits, gpt
        from tailbound_lab.bench.trainee import MALLOC
    except ModuleNotFoundError as error:
        raise CapabilityError(f"training needs {error.name}: pip install 'tailbound-lab[demo]'") from error
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tailbound-bench-") as folder, Preparation() as preparation:
        console.print("preparing: the data, and machine code that is not in the cache yet", highlight=False)
        sources = {"digits": digits.load, "text": gpt.load}
        for data, seed in {(scenario.data, seed) for scenario in scenarios for seed in scenario.seeds}:
            digits.save(sources[data](seed), Path(folder, f"{data}{seed}.npz"))
        preparation.wait()
        bursts = _bursts(scenarios, console)
        for scenario in scenarios:
            for loss, tail in product(scenario.losses, scenario.tails):
                variants = scenario.variants_at(loss)
                if not variants:  # all that is asked for was trained at the first loss
                    continue
                background = bursts[scenario.workers, scenario.rate, tail]
                spec = LabSpec(
                    scenario.workers, rate=scenario.rate, loss=loss, seed=scenario.seeds[0], background=background
                )
                with Cluster(spec) as lab:
                    about = conditions(spec) | {
                        "cpus": os.cpu_count() or 1, "tail": tail, "background": background and str(background),
                    }  # fmt: skip
                    job = dataclasses.asdict(scenario) | {
                        "data_folder": folder, "variants": variants, "options": dict(options or {}),
                        "datapath": datapath_at(lab, datapath),
                    }  # fmt: skip
                    with Experiment(lab, job, console, worker=COURSE, env=MALLOC) as experiment:
                        for seed in scenario.seeds:
                            new = _train(experiment, scenario, seed, variants, about, console)
                            rows += new
                            table.show(title(new[0]), new, COLUMNS, console)
                            table.save(rows, json_file)
    arrivals = to_loss.arrivals(rows)
    if arrivals:
        table.show("time to Gloo's loss; > where not all seeds got there", to_loss.lines(arrivals), console=console)
    return rows


def _bursts(scenarios: Sequence[Scenario], console: Console) -> _Bursts:
    """Find the foreign bursts of each network, once for all scenarios.

    Raises:
        CapabilityError: there can be no lab.
    """
    found: _Bursts = {}
    for scenario in scenarios:
        network = scenario.workers, scenario.rate
        found |= {(*network, None): None}
        missing = [tail for tail in scenario.tails if (*network, tail) not in found]
        if missing:
            console.print("bursts: set by Gloo's all-reduces of 25 MiB", highlight=False)
            spec = LabSpec(scenario.workers, rate=scenario.rate, seed=scenario.seeds[0], background=PLACEHOLDER)
            with in_lab(spec, [OURS, GLOO], _CALIBRATED_ON, "udp", console) as bench:
                for tail in missing:
                    assert tail is not None
                    found[(*network, tail)] = bench.calibrated(tail, scenario.calibration)[0]
    return found


def _train(
    experiment: Experiment, scenario: Scenario, seed: int, variants: Sequence[str], about: Mapping[str, Any],
    console: Console,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train with one seed; return its rows."""
    trouble = f"tail {about['tail']:g}" if about["tail"] else f"loss {about['loss']:.1%}"
    where = f"{scenario.name}, {trouble}, seed {seed}: {scenario.steps} steps of {', '.join(variants)}"
    console.print(where, highlight=False)
    turns = Turns(variants, scenario.workers)
    begun = experiment.phase(do="begin", seed=seed).reports
    ended = experiment.phase(do="run", on=turns.add).reports
    experiment.phase(do="finish")
    ends = [one | other for one, other in zip(begun, ended, strict=True)]
    return [row(name, turns.records[name], ends, scenario, seed, about) for name in variants]
