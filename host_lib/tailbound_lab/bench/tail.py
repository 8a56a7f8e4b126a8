"""``tailbound bench tail``: how slow the slowest all-reduces are, in a network that has trouble, in turn with others'.

Environments: ``calm``; ``tail1.5`` and ``tail3``, foreign bursts as in a shared cloud, as long as it takes for Gloo's
P99/P50 to be 1.5 and 3; ``stopped``, a rank that stands still for a second while the others go on; ``late``, a rank
that comes 250 ms late to every all-reduce; ``loss0.1``, ``loss1`` and ``burst1``, per cent of packets lost, one by one
or in bursts, packets of wire size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from tailbound.errors import ConfigError
from tailbound_lab.bench import calibrate, figures, table
from tailbound_lab.bench.channel import GLOO, OURS
from tailbound_lab.bench.experiment import WARM_UP, Experiment, Phase, conditions, opened, rows_of
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.faults import Fault
from tailbound_lab.lab.ranks import Ranks
from tailbound_lab.lab.spec import Background, Burst, LabSpec
from tailbound_lab.lab.straggler import Freezer

_TAILS = {"tail1.5": 1.5, "tail3": 3.0}
_FAULTS = {"loss0.1": Fault(loss=0.001), "loss1": Fault(loss=0.01), "burst1": Fault(burst=Burst(0.01))}
ENVS = ("calm", *_TAILS, "stopped", "late", *_FAULTS)
COLUMNS: table.Columns = {
    "name": ("who\n", ""), "iters": ("n\n", "d"), "p50_ms": ("p50\nms", "ms"), "mean_ms": ("mean\nms", "ms"),
    "p99_ms": ("p99\nms", "ms"), "max_ms": ("max\nms", "ms"), "tail": ("p99/\np50", ".2f"), "cpu_ms": ("CPU\nms", "ms"),
    "delivered": ("arrived\n%", "%"), "deadline_hits": ("late\n", "d"),
    "nmse": ("\nNMSE", ".1e"),
}  # fmt: skip
#: A lab is built with a namespace for the background only if it has one; this one is replaced before anything runs.
PLACEHOLDER = Background(1_000_000, 1.0, 3_600_000)
_STOP_AT, _STOP_SECONDS, _BLOCK_SECONDS = 1.0, 1.0, 4.0
_LATE_SECONDS = 0.25
#: Where others' iterations are so long that few of ours fit between them, ours go on alone up to this many.
_ENOUGH = 120
#: Rounds whose results are compared with the exact mean: every so many, since comparing takes as long as averaging.
_COMPARED_EVERY = 10


def run(
    *,
    workers: int = 4,
    size: int = 25 << 20,
    rate: int = 10**9,
    seconds: float = 60.0,
    envs: Sequence[str] = ENVS,
    vs: Sequence[str] = (GLOO,),
    seed: int = 1,
    datapath: str = "auto",
    json_file: Path | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Measure, print tables, write ``json_file`` after every environment; return its rows.

    Arguments are the options of the command, sizes in bytes and rates in bit/s.

    Raises:
        ConfigError, CapabilityError: what is asked for cannot be had here.
        TransportError: a worker failed.
    """
    console = console or Console()
    wrong = [env for env in envs if env not in ENVS]
    if wrong or workers < 2 or size < 4 * workers or not seconds > 0 or GLOO not in vs:
        raise ConfigError(f"give two workers or more, a float32 for each, some seconds, and environments of {ENVS}")
    names = [OURS, *dict.fromkeys(vs)]
    rows: list[dict[str, Any]] = []
    labs = (LabSpec(workers, rate=rate, seed=seed, background=PLACEHOLDER), LabSpec(workers, cables=True, seed=seed))
    for spec in labs:
        chosen = [env for env in ENVS if env in envs and (env in _FAULTS) == spec.cables]
        if not chosen:
            continue
        with in_lab(spec, names, size - size % 4, datapath, console) as bench:
            for env in chosen:
                console.print(f"{env}: measuring for about {seconds:.0f} s", highlight=False)
                new = bench.env(env, seconds)
                rows += new
                title = f"{env}: all-reduce of {size} B, {workers} workers"
                table.show(title, new, COLUMNS, console)
                table.save(rows, json_file)
    return rows


class Bench:
    """Workers in a lab whose background is silent, and what troubles them."""

    def __init__(self, lab: Cluster, experiment: Experiment, names: Sequence[str], size: int, console: Console) -> None:
        self.lab, self._experiment, self._names, self._size = lab, experiment, list(names), size
        self._console = console

    def env(self, env: str, seconds: float) -> list[dict[str, Any]]:
        """Return the rows of one environment."""
        if env in _TAILS:
            return self._tail(env, seconds)
        if env == "stopped":
            return self._stopped(seconds)
        about = conditions(self.lab.spec)
        if (fault := _FAULTS.get(env)) is not None:
            self._phase([OURS], rounds=1)  # the workers find each other before anything is lost
            self.lab.set_faults(fault)
            about = conditions(dataclasses.replace(self.lab.spec, loss=fault.loss, burst=fault.burst))
        late = {"late": _LATE_SECONDS} if env == "late" else {}
        if late:  # deadlines follow before anything counts
            self._phase([OURS], rounds=WARM_UP, **late)
        phase = self._measure(seconds, **late)
        if fault is not None:
            self.lab.set_faults(Fault())
        return self._rows(env, phase, about, self.lab.spec.workers - 1 if late else None)

    def calibrated(self, target: float, seconds: float) -> tuple[Background, list[tuple[float, float]]]:
        """Return bursts that give Gloo's all-reduces a P99/P50 of ``target``, on Gloo alone, and all trials."""
        self.lab.set_background(None)
        calm = self._phase([GLOO], rounds=20, seconds=seconds / 4).slowest(GLOO)
        spec = self.lab.spec
        assert spec.rate is not None
        first = calibrate.guess(target, figures.percentile(calm, 50), spec.workers, spec.rate, seconds)

        def probe(background: Background) -> list[float]:
            self.lab.set_background(background)
            times = self._phase([GLOO], seconds=seconds / 2).slowest(GLOO)
            told = f"tail {target:g}: bursts of {background.on_ms:.0f} ms make Gloo's ratio {calibrate.tail(times):.2f}"
            self._console.print(told, highlight=False)
            return times

        return calibrate.search(target, first, probe)

    def _phase(self, names: Sequence[str], **what: Any) -> Phase:
        return self._experiment.phase(names=list(names), size=self._size, **what)

    def _measure(self, seconds: float, **what: Any) -> Phase:
        """All in turn; if they leave time for few of ours, ours go on alone."""
        whole = self._phase(self._names, seconds=seconds, compare=_COMPARED_EVERY, **what)
        if (few := _ENOUGH - len(whole.slowest(OURS))) > 0:
            whole.add(self._phase([OURS], seconds=seconds / 2, rounds=few, compare=_COMPARED_EVERY, **what))
        return whole

    def _rows(self, env: str, phase: Phase, about: dict[str, Any], without: int | None = None) -> list[dict[str, Any]]:
        about = {"env": env} | about | {"datapath": self._experiment.datapath}
        return rows_of(phase, self._size, about, without)

    def _tail(self, env: str, seconds: float) -> list[dict[str, Any]]:
        """Calibrate on Gloo alone, then measure all."""
        background, tried = self.calibrated(_TAILS[env], seconds)
        self.lab.set_background(background)
        phase = self._measure(seconds)
        self.lab.set_background(None)
        about = {"target": _TAILS[env], "background": str(background), "probes": [list(each) for each in tried]}
        return self._rows(env, phase, conditions(self.lab.spec) | about)

    def _stopped(self, seconds: float) -> list[dict[str, Any]]:
        """Blocks of paced iterations, of each in turn; in each the last rank stands still for a second."""
        victim = self.lab.spec.workers - 1
        pace = self._phase(self._names, rounds=12)
        median = {name: figures.percentile(pace.slowest(name), 50) for name in self._names}
        whole, costs = Phase(), dict[str, list[float]]((name, []) for name in self._names)
        count = len(self._names)
        for block in range(max(count, int(seconds / (_BLOCK_SECONDS + 1)))):
            name = self._names[block % count]
            period = 2 * median[name]
            phase = self._stopped_once(name, max(4, int(_BLOCK_SECONDS / period)), period, victim)
            times = phase.slowest(name, without=victim)
            costs[name].append(sum(times) - len(times) * figures.percentile(times, 50))
            whole.add(phase)
        about = {"victim": victim, "stop_ms": _STOP_SECONDS * 1e3}
        rows = self._rows("stopped", whole, conditions(self.lab.spec) | about, victim)
        for row in rows:
            # what one stop cost the others in all, over the iterations that it touched
            row["cost_ms"] = figures.percentile(costs[row["name"]], 50) * 1e3
        return rows

    def _stopped_once(self, name: str, rounds: int, period: float, victim: int) -> Phase:
        with ExitStack() as stack:

            def stop(ranks: Ranks) -> None:
                stack.callback(Freezer(ranks.processes[victim].pid, _STOP_SECONDS, [_STOP_AT]).close)

            return self._phase([name], rounds=rounds, period=period, at_start=stop)


@contextmanager
def in_lab(spec: LabSpec, names: Sequence[str], size: int, datapath: str, console: Console) -> Iterator[Bench]:
    """Open a lab with workers that are warm when they are asked for anything."""
    with opened(spec, datapath, console) as (lab, _, path):
        if spec.background is not None:
            lab.set_background(None)
        with Experiment(lab, {"names": list(names), "datapath": path}, console) as experiment:
            experiment.phase(names=[OURS], rounds=WARM_UP, size=size)
            yield Bench(lab, experiment, names, size, console)
