"""``tailbound bench tail``: how slow the slowest all-reduces are, in a network that has trouble, in turn with Gloo's.

Environments: ``calm``; ``tail1.5`` and ``tail3``, foreign bursts as in a shared cloud, as long as it takes for Gloo's
P99/P50 to be 1.5 and 3; ``loss0.1`` and ``loss1``, per cent of packets lost, packets of wire size; ``stopped``, a rank
that stands still for a second while the others go on.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tailbound.errors import ConfigError
from tailbound.prepare import Preparation
from tailbound_lab.bench import calibrate, figures
from tailbound_lab.bench.allreduce import conditions
from tailbound_lab.bench.crew import Crew, Phase
from tailbound_lab.bench.meter import per_op
from tailbound_lab.bench.places import datapath_at
from tailbound_lab.bench.save import save
from tailbound_lab.bench.worker import OURS, THEIRS
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.faults import Fault
from tailbound_lab.lab.spec import Background, LabSpec

ENVS = ("calm", "tail1.5", "tail3", "stopped", "loss0.1", "loss1")
_TAILS = {"tail1.5": 1.5, "tail3": 3.0}
_LOSSES = {"loss0.1": 0.001, "loss1": 0.01}
BOTH = (OURS, THEIRS)
#: A lab is built with a namespace for the background only if it has one; this one is replaced before anything runs.
PLACEHOLDER = Background(1_000_000, 1.0, 3_600_000)
_STOP_AT, _STOP_SECONDS, _BLOCK_SECONDS = 1.0, 1.0, 4.0
#: Where Gloo's iterations are so long that few of ours fit between them, ours go on alone up to this many.
_ENOUGH = 120


def run(
    *,
    workers: int = 4,
    size: int = 25 << 20,
    rate: int = 10**9,
    seconds: float = 60.0,
    envs: Sequence[str] = ENVS,
    seed: int = 1,
    datapath: str = "auto",
    json_file: Path | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Measures, prints tables, writes ``json_file`` after every environment; returns its rows.

    Args:
        workers: ranks.
        size: bytes of float32.
        rate: of every link in bit/s, where packets are not lost.
        seconds: how long to measure in each environment (calibration apart).
        envs: of ``ENVS``.
        seed: of losses and bursts.
        datapath: ``auto``, ``xdp`` or ``udp``.
        json_file: where the rows go.
        console: where tables and progress go.

    Raises:
        ConfigError, CapabilityError: what is asked for cannot be had here.
        TransportError: a worker failed.
    """
    console = console or Console()
    wrong = [env for env in envs if env not in ENVS]
    if wrong or workers < 2 or size < 4 * workers or not seconds > 0:
        raise ConfigError(f"give two workers or more, a float32 for each, some seconds, and environments of {ENVS}")
    size -= size % 4
    rows: list[dict[str, Any]] = []

    def keep(new: list[dict[str, Any]]) -> None:
        rows.extend(new)
        console.print(table(new))
        save(rows, json_file)

    with tempfile.TemporaryDirectory(prefix="tailbound-bench-") as name, Preparation() as preparation:
        folder = Path(name)
        console.print("preparing: compiling what is not compiled yet", highlight=False)
        preparation.wait()
        labs = (
            LabSpec(workers, rate=rate, seed=seed, background=PLACEHOLDER),
            LabSpec(workers, cables=True, seed=seed),
        )
        for spec in labs:
            chosen = [env for env in ENVS if env in envs and (env in _LOSSES) == spec.cables]
            if not chosen:
                continue
            with crew_in_lab(spec, size, datapath, folder, console) as (lab, crew):
                for env in chosen:
                    console.print(f"{env}: measuring for about {seconds:.0f} s", highlight=False)
                    if env in _TAILS:
                        keep(_tail(env, lab, crew, size, seconds, console))
                    elif env == "stopped":
                        keep(_stopped(lab, crew, size, seconds))
                    else:
                        keep(_plain(env, lab, crew, size, seconds))
    console.print(aims_table(aims(rows)))
    return rows


@contextmanager
def crew_in_lab(
    spec: LabSpec, size: int, datapath: str, folder: Path, console: Console
) -> Iterator[tuple[Cluster, Crew]]:
    """A lab whose background is silent, and its workers."""
    with Cluster(spec) as lab:
        if spec.background is not None:
            lab.set_background(None)
        with Crew(lab, size, datapath_at(lab, datapath), folder, console) as crew:
            yield lab, crew


def _measure(crew: Crew, seconds: float) -> Phase:
    """Both in turn; if Gloo gets stuck, or leaves time for few of ours, ours go on alone."""
    whole = crew.phase(BOTH, seconds=seconds, compare=True)
    if len(whole.slowest(OURS)) < _ENOUGH:
        whole.add(crew.phase([OURS], seconds=seconds / 2, rounds=_ENOUGH - len(whole.slowest(OURS)), compare=True))
    return whole


def _plain(env: str, lab: Cluster, crew: Crew, size: int, seconds: float) -> list[dict[str, Any]]:
    """No background; in a lab without a rate, the loss that the environment is called after."""
    loss = _LOSSES.get(env, 0.0)
    if lab.spec.cables:
        crew.phase([OURS], rounds=1)  # the workers find each other before anything is lost
        lab.set_faults(Fault(loss=loss))
    phase = _measure(crew, seconds)
    if lab.spec.cables:
        lab.set_faults(Fault())
    about = conditions(dataclasses.replace(lab.spec, loss=loss), True) | {"datapath": crew.datapath}
    return summarize(env, phase, size, about)


def calibrated(
    target: float, lab: Cluster, crew: Crew, seconds: float, console: Console
) -> tuple[Background, list[tuple[float, float]]]:
    """Bursts that give Gloo's all-reduces a P99/P50 of ``target``, measured on Gloo alone; and what was tried."""
    lab.set_background(None)
    calm = crew.phase([THEIRS], rounds=20, seconds=seconds / 4).slowest(THEIRS)
    assert lab.spec.rate is not None
    first = calibrate.guess(target, figures.percentile(calm, 50), lab.spec.workers, lab.spec.rate, seconds)

    def probe(background: Background) -> list[float]:
        lab.set_background(background)
        times = crew.phase([THEIRS], seconds=seconds / 2).slowest(THEIRS)
        ratio = calibrate.tail(times)
        told = f"tail {target:g}: bursts of {background.on_ms:.0f} ms make Gloo's ratio {ratio:.2f}"
        console.print(told, highlight=False)
        return times

    return calibrate.search(target, first, probe)


def _tail(env: str, lab: Cluster, crew: Crew, size: int, seconds: float, console: Console) -> list[dict[str, Any]]:
    """Calibrates on Gloo alone, then measures both; once more with a correction, if Gloo's ratio is not the target."""
    target = _TAILS[env]
    background, tried = calibrated(target, lab, crew, seconds, console)
    attempts: list[tuple[float, Background, Phase]] = []
    while True:
        lab.set_background(background)
        phase = _measure(crew, seconds)
        ratio = calibrate.tail(phase.slowest(THEIRS))
        attempts.append((abs(ratio - target), background, phase))
        if calibrate.near(ratio, target) or len(attempts) == 2:
            break
        console.print(f"{env}: Gloo's ratio came to {ratio:.2f}; once more with other bursts", highlight=False)
        background = calibrate.corrected(background, ratio, target)
    lab.set_background(None)
    _, background, phase = min(attempts, key=lambda attempt: attempt[0])
    about = {"target": target, "background": str(background), "probes": [list(each) for each in tried]}
    return summarize(env, phase, size, conditions(lab.spec, True) | {"datapath": crew.datapath} | about)


def _stopped(lab: Cluster, crew: Crew, size: int, seconds: float) -> list[dict[str, Any]]:
    """Blocks of paced iterations, ours and Gloo's in turn; in each the last rank stands still for a second."""
    victim = lab.spec.workers - 1
    pace = crew.phase(BOTH, rounds=12)
    median = {name: figures.percentile(pace.slowest(name), 50) for name in BOTH}
    whole = Phase()
    costs: dict[str, list[float]] = {name: [] for name in BOTH}
    for block in range(max(2, int(seconds / (_BLOCK_SECONDS + 1)))):
        name = BOTH[block % 2]
        period = 2 * median[name]
        rounds = max(4, int(_BLOCK_SECONDS / period))
        phase = crew.phase([name], rounds=rounds, period=period, stop=(victim, _STOP_AT, _STOP_SECONDS))
        times = phase.slowest(name, without=victim)
        costs[name].append(sum(times) - len(times) * figures.percentile(times, 50))
        whole.add(phase)
    about = conditions(lab.spec, True) | {"datapath": crew.datapath, "victim": victim, "stop_ms": _STOP_SECONDS * 1e3}
    rows = summarize("stopped", whole, size, about, without=victim)
    for row in rows:
        # what one stop cost the others in all, over the iterations that it touched
        row["cost_ms"] = figures.percentile(costs[row["name"]], 50) * 1e3
    return rows


def summarize(
    env: str, phase: Phase, size: int, settings: dict[str, Any], without: int | None = None
) -> list[dict[str, Any]]:
    """Rows of one environment, Tailbound's first; ``without``: a rank that does not count.

    What Tailbound's ranks count is None where no phase was reported: an all-reduce of Gloo that did not end takes the
    counts of its phase with it.
    """
    rows = []
    reports = [report for report in phase.reports if report["rank"] != without]
    for name in BOTH:
        times = phase.slowest(name, without)
        if not times:
            continue
        ours = name == OURS
        workers = len(phase.times[name])
        p50, p99 = (figures.percentile(times, percent) for percent in (50, 99))
        expected = sum(report["expected"] for report in reports)
        errors = [error for report in reports for error in report["nmse"]] if ours else []
        rows.append(
            {
                "name": name,
                "env": env,
                "workers": workers,
                "bytes": size,
                "iters": len(times),
                "p50_ms": p50 * 1e3,
                "p99_ms": p99 * 1e3,
                "mean_ms": sum(times) / len(times) * 1e3,
                "max_ms": max(times) * 1e3,
                "min_ms": min(times) * 1e3,
                "tail": p99 / p50,
                "stuck": sum(1 for stuck, _ in phase.stuck if stuck == name),
                "algbw_gbps": figures.algbw(size, p50),
                "busbw_gbps": figures.busbw(size, p50, workers),
                "delivered": (sum(r["delivered"] for r in reports) / expected if expected else None) if ours else 1.0,
                "deadline_hits": (sum(r["deadline_hits"] for r in reports) if reports else None) if ours else 0,
                "deadline_1_ms": max(r["deadlines_ms"][0] for r in reports) if ours and reports else None,
                "deadline_2_ms": max(r["deadlines_ms"][1] for r in reports) if ours and reports else None,
                "nmse": sum(errors) / len(errors) if errors else None,
                **per_op((entry for report in phase.reports for entry in report["spent"]), name),
                **settings,
                "datapath": settings["datapath"] if ours else "tcp",
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of one environment, narrow enough for 80 columns."""
    title = f"{rows[0]['env']}: all-reduce of {rows[0]['bytes']} B, {rows[0]['workers']} workers"
    result = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    result.add_column("who\n", no_wrap=True)
    for heading in (
        "n\n", "p50\nms", "mean\nms", "p99\nms", "max\nms", "p99/\np50", "CPU\nms", "arrived\n%", "late\n", "stuck\n",
        "NMSE\n",
    ):  # fmt: skip
        result.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        result.add_row(
            row["name"], str(row["iters"]),
            *(_ms(row[key]) for key in ("p50_ms", "mean_ms", "p99_ms", "max_ms")), f"{row['tail']:.2f}",
            _ms(row["cpu_ms"]), "-" if row["delivered"] is None else f"{100 * row['delivered']:.3f}",
            "-" if row["deadline_hits"] is None else str(row["deadline_hits"]), str(row["stuck"]),
            "-" if row["nmse"] is None else f"{row['nmse']:.1e}",
        )  # fmt: skip
    return result


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def aims(rows: Sequence[dict[str, Any]]) -> list[tuple[str, float | None, str, bool]]:
    """(what, value, aim, reached) of everything these rows say something about; None: not measured, so not reached."""
    by = {(row["env"], row["name"]): row for row in rows}
    out: list[tuple[str, float | None, str, bool]] = []

    def at_most(what: str, value: float | None, most: float) -> None:
        out.append((what, value, f"<= {most:g}", value is not None and value <= most))

    def at_least(what: str, value: float | None, least: float) -> None:
        out.append((what, value, f">= {least:g}", value is not None and value >= least))

    for env, most in (("tail1.5", 1.2), ("tail3", 1.3)):
        if (env, OURS) in by:
            at_most(f"{env}: p99/p50", by[env, OURS]["tail"], most)
        if (env, THEIRS) in by:
            ratio = by[env, THEIRS]["tail"]
            out.append(
                (f"{env}: p99/p50 of gloo", ratio, f"{_TAILS[env]:g} +- 10 %", calibrate.near(ratio, _TAILS[env]))
            )
    if ("tail1.5", OURS) in by and ("tail3", OURS) in by:
        means = by["tail3", OURS]["mean_ms"] / by["tail1.5", OURS]["mean_ms"]
        at_most("mean of tail3 over that of tail1.5", means, 1.03)
    for env in _LOSSES:
        if (env, OURS) in by and (env, THEIRS) in by:
            at_least(f"{env}: p99 of gloo over ours", by[env, THEIRS]["p99_ms"] / by[env, OURS]["p99_ms"], 10)
    if ("loss0.1", OURS) in by:
        at_least("loss0.1: delivered", by["loss0.1", OURS]["delivered"], 0.999)
    if ("stopped", OURS) in by:
        row = by["stopped", OURS]
        deadline = row["deadline_1_ms"]
        cost = None if deadline is None else row["cost_ms"] / max(deadline, 1e-3)
        at_most("stopped: cost to the others in deadlines", cost, 1)
    return out


def aims_table(results: Sequence[tuple[str, float | None, str, bool]]) -> Table:
    """Aims and what came of them."""
    result = Table(title="aims", title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for heading in ("what", "measured", "aim", ""):
        result.add_column(heading, justify="left" if heading == "what" else "right", no_wrap=True)
    for what, value, aim, reached in results:
        measured = "-" if value is None else f"{value:.4g}"
        result.add_row(what, measured, aim, "reached" if reached else "missed" if value is not None else "not measured")
    return result
