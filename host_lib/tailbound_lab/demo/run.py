"""``tailbound demo``: a real training on lossy links, beside the same over Gloo."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from tailbound.errors import CapabilityError, TransportError
from tailbound.prepare import Preparation
from tailbound_lab.bench import digits
from tailbound_lab.bench.curve import Curve
from tailbound_lab.bench.experiment import COURSE, Experiment
from tailbound_lab.bench.places import Loopback, Place, datapath_at, open_place
from tailbound_lab.bench.trainee import MALLOC
from tailbound_lab.demo import show
from tailbound_lab.demo.ledger import Balance, balance
from tailbound_lab.demo.summary import delivery, drift
from tailbound_lab.lab import user_namespace
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.spec import Burst, LabSpec, Straggler
from tailbound_lab.lab.topology import Link

#: What both have to bear: cables of so many bit/s, losses from worker to worker (in bursts where XDP programs can make
#: them), and one rank that computes longer in every step.
RATE, LOSS, STRAGGLER_MS = 10**9, 0.01, 25.0
SEED = 7
#: Images a rank and step.
_BATCH = 16
#: What is trained (``train_plan.Scenario``): steps in a row over the same transport, with a look at the accuracy then.
#: Owner maps would still be settled while the packets are counted. A multicast packet that a worker's own cable loses
#: would be one loss to the cable and several to the ledgers.
_TRAINING: dict[str, Any] = {
    "model": "digits", "data": "digits", "variants": ["gloo", "tailbound"], "batch": _BATCH, "turn": 11, "look": 1,
    "learning_rate": 0.01, "momentum": 0.9, "powersgd_share": 0.0, "device": "cpu", "together": True,
    "bucket_mib": digits.BUCKET_MIB, "options": {"share_rows": False, "result": "fanout"},
}  # fmt: skip
#: Lines of the workers' output that are shown when one fails.
_LAST_WORDS = 20
#: Attempts at reading all counters while nothing moves.
_READINGS = 20


@dataclass(frozen=True)
class Length:
    """How long to train: epochs, and seconds (both transports together) after which no new turn begins."""

    epochs: int
    seconds: float


FULL, QUICK = Length(8, 120.0), Length(2, 20.0)


@dataclass
class Records:
    """Everything that the ranks reported."""

    datapath: str
    curves: dict[str, Curve]
    warm: list[dict[str, Any]]
    last: list[dict[str, Any]]
    cpu_seconds: list[float]
    ledger: Balance
    lost_on_purpose: int


def run(
    *,
    out: Path,
    quick: bool = False,
    datapath: str = "auto",
    workers: int = 4,
    length: Length | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Trains, prints a table, writes ``demo.png`` and ``summary.json`` into ``out``; returns the summary.

    The workers' own output goes to ``workers.log`` there.

    Args:
        out: folder, made if need be.
        quick: a shorter training.
        datapath: ``auto``, ``xdp`` or ``udp``.
        workers: ranks.
        length: of the training, instead of what ``quick`` says.
        console: where progress and the table go.

    Raises:
        CapabilityError: ``xdp`` was asked for and cannot be had, or an extra is missing.
        TransportError: a rank failed; the message names it.
    """
    console = console or Console()
    length = length or (QUICK if quick else FULL)
    straggler = Straggler(workers - 1, STRAGGLER_MS, None)
    plain = LabSpec(workers, straggler=straggler, seed=SEED)
    lossy = lossy_network(workers, straggler, bursts=not user_namespace.owned())
    out.mkdir(parents=True, exist_ok=True)
    steps_shown = show.Steps(console, 4)
    with tempfile.TemporaryDirectory(prefix="tailbound-demo-") as name, Preparation() as preparation:
        folder = Path(name)
        with steps_shown.step("data and machine code (a minute the first time)"):
            data = digits.load(SEED)
            digits.save(data, folder / f"digits{SEED}.npz")
            preparation.wait()
        steps = len(data.train_labels) // (workers * _BATCH) * length.epochs
        with ExitStack() as stack:
            with steps_shown.step("the network"):
                place, why_not = stack.enter_context(open_best(plain, lossy, datapath))
            spec = place.spec
            show.conditions(console, place, why_not)
            job = _TRAINING | {
                "data_folder": name, "steps": steps, "seconds": length.seconds,
                "datapath": datapath_at(place, datapath),
            }  # fmt: skip
            log = stack.enter_context(_log(out / "workers.log", console))
            with Experiment(place, job, log, worker=COURSE, env=MALLOC) as experiment:
                records = follow(experiment, place, steps, console, steps_shown)
        drifts = {
            each: drift([np.load(folder / f"{each}{rank}.npy") for rank in range(workers)]) for each in records.curves
        }
    summary = summarize(records, drifts, spec, why_not, steps)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    show.picture(records.curves, summary, spec, out / "demo.png")
    show.results(console, summary, out)
    return summary


@contextmanager
def _log(path: Path, console: Console) -> Iterator[Console]:
    """What workers print goes to a file, its last lines to the console if the demo fails."""
    with path.open("w") as file:
        try:
            yield Console(file=file, width=1000)
        except TransportError:
            file.flush()
            lines = path.read_text().splitlines()[-_LAST_WORDS:]
            console.print(*lines, f"all of it: {path}", sep="\n", markup=False, highlight=False, soft_wrap=True)
            raise


@contextmanager
def open_best(plain: LabSpec, lossy: LabSpec, datapath: str) -> Iterator[tuple[Place, str | None]]:
    """The lossy lab where it can be had, else loopback without losses.

    Yields:
        The place, and why it is not the lab (None: it is).

    Raises:
        CapabilityError: ``xdp`` was asked for and there can be no lab.
    """
    with ExitStack() as stack:
        try:
            place, why_not = stack.enter_context(open_place(lossy, datapath))
        except CapabilityError as error:
            if datapath == "xdp":
                raise
            place, why_not = stack.enter_context(Loopback(plain)), str(error)
        yield place, why_not


def lossy_network(workers: int, straggler: Straggler, *, bursts: bool) -> LabSpec:
    """The network of the demo; losses in bursts need XDP programs, so without them they are independent."""
    losses: dict[str, Any] = {"burst": Burst(LOSS)} if bursts else {"loss": LOSS}
    return LabSpec(workers, rate=RATE, straggler=straggler, seed=SEED, **losses)


def follow(experiment: Experiment, place: Place, steps: int, console: Console, steps_shown: show.Steps) -> Records:
    """Show progress until the training is over and everything is counted.

    Args:
        experiment: with a worker a rank.
        place: where it runs.
        steps: of each transport, at most.
        console: for progress.
        steps_shown: of the whole demo.
    """
    ranks = place.spec.workers
    curves = {"tailbound": Curve(), "gloo": Curve()}
    looks: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    with steps_shown.step(f"{ranks} workers start, and make steps that do not count"):
        warm = experiment.phase(do="begin", seed=SEED).reports
    steps_shown.say("training, in turns of a few steps each")
    with show.progress(console, steps) as tell:

        def told(rank: int, message: dict[str, Any]) -> None:
            if message["kind"] != "turn":
                return
            look = looks.setdefault((message["name"], message["number"]), {})
            look[rank] = message
            if len(look) == ranks:
                curve, messages = curves[message["name"]], [look[each] for each in range(ranks)]
                times = [[sum(step) for step in one["steps"]] for one in messages]
                curve.add(times, [one["accuracy"] for one in messages])
                tell(message["name"], curve)

        ended = experiment.phase(do="run", on=told).reports
    experiment.phase(do="weights")
    last, ledger, lost = count(experiment, place)
    experiment.phase(do="finish")
    path = "+".join(sorted({one["datapath"] for one in ended}))
    cpu = [one["cpu_seconds"] for one in ended]
    return Records(path, curves, [one["stats"] for one in warm], last, cpu, ledger, lost)


def count(experiment: Experiment, place: Place) -> tuple[list[dict[str, Any]], Balance, int]:
    """Read every counter until two readings in a row are the same: then nothing is in flight any more.

    Returns:
        The ranks' statistics, the balance, packets that the cables lost on purpose.

    Raises:
        TransportError: the counters never rest.
    """
    before = None
    for _ in range(_READINGS):
        found = experiment.phase(do="stats").reports
        stats = [one["stats"] for one in found]
        sockets = sum(one["socket_drops"] for one in found)
        lost = doubled = queues = 0
        if isinstance(place, Cluster):
            faults = place.fault_counts(link=Link.DATA)
            # what ranks ask of each other over TCP, re-synchronisation above all, takes the same cables
            lost, doubled = faults.lost - faults.lost_other, faults.duplicated
            queues = sum(entry.lost for entry in place.drops() if entry.interface.startswith(Link.DATA.value))
        whole = balance(stats, socket_drops=sockets, lost_on_purpose=lost, duplicated=doubled, lost_in_queues=queues)
        if whole == before:
            return stats, whole, lost
        before = whole
    raise TransportError(f"packets are still moving after the end of the training: {before}")


def summarize(
    records: Records, drifts: dict[str, float], spec: LabSpec, why_not: str | None, steps_planned: int
) -> dict[str, Any]:
    """The content of ``summary.json``."""
    ours, theirs = records.curves["tailbound"], records.curves["gloo"]
    flow = delivery(records.warm, records.last)
    summed = flow.pop("rows_summed")
    return {
        "datapath": records.datapath,
        **ours.figures(),
        **{f"gloo_{name}": value for name, value in theirs.figures().items()},
        "rows_summed_in_kernel": summed if records.datapath == "xdp" else 0,
        "rows_summed": summed,
        **flow,
        "ledger_balanced": records.ledger.balanced,
        "ledger": records.ledger.as_dict(),
        "replica_drift": drifts["tailbound"],
        "gloo_replica_drift": drifts["gloo"],
        "workers": spec.workers,
        "steps": len(ours.iterations),
        "steps_planned": steps_planned,
        "stopped_by_time": len(ours.iterations) < steps_planned,
        "batch_per_worker": _BATCH,
        "lab": why_not is None,
        "why_no_lab": why_not,
        "rate": spec.rate,
        "loss": spec.loss,
        "burst_loss": spec.burst.loss if spec.burst else 0.0,
        "burst_length": spec.burst.length if spec.burst else None,
        "wire": spec.wire_size,
        "straggler": str(spec.straggler),
        "seed": SEED,
        "cpu_seconds_by_rank": records.cpu_seconds,
        "host": show.host(),
        "curves": {name: curve.curve() for name, curve in records.curves.items()},
    }
