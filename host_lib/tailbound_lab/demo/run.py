"""``tailbound demo``: a real training on lossy links, beside the same over Gloo."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from tailbound.errors import TransportError
from tailbound.prepare import Preparation
from tailbound_lab.bench import digits
from tailbound_lab.bench.experiment import COURSE, Experiment, datapath_at
from tailbound_lab.bench.figures import percentile
from tailbound_lab.bench.train_rows import TARGET, Record, Turns
from tailbound_lab.bench.trainee import MALLOC
from tailbound_lab.demo import picture, show
from tailbound_lab.demo.ledger import Balance, balance
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
#: The training (``train_plan.Scenario``): steps in a row over the same transport, with a look at the accuracy then.
#: Owner maps would still be settled while the packets are counted. A multicast packet that a worker's own cable loses
#: would be one loss to the cable and several to the ledgers.
_TRAINING: dict[str, Any] = {
    "model": "digits", "data": "digits", "variants": ["gloo", "tailbound"], "batch": _BATCH, "turn": 11, "look": 1,
    "learning_rate": 0.01, "momentum": 0.9, "device": "cpu",
    "bucket_mib": digits.BUCKET_MIB, "options": {"advanced": {"share_rows": False, "result": "fanout"}},
}  # fmt: skip
#: Lines of the workers' output that are shown when one fails.
_LAST_WORDS = 20
#: Looks that the settled accuracy is the mean of.
_LAST_LOOKS = 3
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
    """Everything that the ranks reported: statistics after the warm-up (``warm``) and at the end (``last``)."""

    datapath: str
    curves: dict[str, Record]
    warm: list[dict[str, Any]]
    last: list[dict[str, Any]]
    cpu_seconds: list[float]
    ledger: Balance


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

    The workers' own output goes to ``workers.log`` there. ``length``: instead of what ``quick`` says.

    Raises:
        CapabilityError: the lab or ``xdp`` cannot be had here, or an extra is missing.
        TransportError: a rank failed; the message names it.
    """
    console = console or Console()
    length = length or (QUICK if quick else FULL)
    spec = lossy_network(workers, bursts=not user_namespace.owned())
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tailbound-demo-") as name, ExitStack() as stack:
        folder = Path(name)
        show.say(console, "[1/4] data and machine code (a minute the first time)")
        with Preparation() as preparation:
            data = digits.load(SEED)
            digits.save(data, folder / f"digits{SEED}.npz")
            preparation.wait()
        steps = len(data.train_labels) // (workers * _BATCH) * length.epochs
        show.say(console, f"[2/4] {workers} workers, a network namespace each; {show.describe(spec)}")
        lab = stack.enter_context(Cluster(spec))
        if not lab.xdp:
            show.say(
                console, "Not root: in a user namespace, gradients arrive over udp sockets. Root sums in the kernel."
            )
        job = _TRAINING | {
            "data_folder": name, "steps": steps, "seconds": length.seconds, "datapath": datapath_at(lab, datapath),
        }  # fmt: skip
        log = stack.enter_context(_log(out / "workers.log", console))
        with Experiment(lab, job, log, worker=COURSE, env=MALLOC) as experiment:
            records = follow(experiment, lab, steps, console)
        drifts = {
            each: drift([np.load(folder / f"{each}{rank}.npy") for rank in range(workers)]) for each in records.curves
        }
    summary = summarize(records, drifts, spec, steps)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    picture.draw(records.curves, show.headline(summary), show.words(summary, spec), out / "demo.png")
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


def lossy_network(workers: int, *, bursts: bool) -> LabSpec:
    """The network of the demo; losses in bursts need XDP programs, so without them they are independent."""
    losses: dict[str, Any] = {"burst": Burst(LOSS)} if bursts else {"loss": LOSS}
    return LabSpec(workers, rate=RATE, straggler=Straggler(workers - 1, STRAGGLER_MS, None), seed=SEED, **losses)


def follow(experiment: Experiment, lab: Cluster, steps: int, console: Console) -> Records:
    """Say how far the training is until it is over and everything is counted; ``steps`` of each transport at most."""
    turns = Turns(("tailbound", "gloo"), lab.spec.workers)
    show.say(console, "[3/4] the workers start, and make steps that do not count")
    warm = experiment.phase(do="begin", seed=SEED).reports
    show.say(console, "[4/4] training, in turns of a few steps each")
    told = dict.fromkeys(turns.records, 0)

    def note(rank: int, message: dict[str, Any]) -> None:
        if (name := turns.add(rank, message)) is None:
            return
        record = turns.records[name]
        done = len(record.iterations)
        if 8 * (done - told[name]) >= steps or done == steps:
            told[name] = done
            words = f"{done} steps in {record.seconds:.1f} s, accuracy {record.points[-1][1]:.1%}"
            show.say(console, f"{picture.LABELS[name]:>9}: {words}")

    ended = experiment.phase(do="run", on=note).reports
    experiment.phase(do="weights")
    last, ledger = count(experiment, lab)
    experiment.phase(do="finish")
    path = "+".join(sorted({one["datapath"] for one in ended}))
    return Records(
        path, turns.records, [one["stats"] for one in warm], last, [one["cpu_seconds"] for one in ended], ledger
    )


def count(experiment: Experiment, lab: Cluster) -> tuple[list[dict[str, Any]], Balance]:
    """Read every counter until two readings in a row are the same: then nothing is in flight any more.

    Returns:
        The ranks' statistics, and the balance.

    Raises:
        TransportError: the counters never rest.
    """
    before = None
    for _ in range(_READINGS):
        found = experiment.phase(do="stats").reports
        stats, faults = [one["stats"] for one in found], lab.fault_counts(link=Link.DATA)
        whole = balance(
            stats,
            socket_drops=sum(one["socket_drops"] for one in found),
            # what ranks ask of each other over TCP, re-synchronization above all, takes the same cables
            lost_on_purpose=faults.lost - faults.lost_other,
            duplicated=faults.duplicated,
            lost_in_queues=sum(entry.lost for entry in lab.drops() if entry.interface.startswith(Link.DATA.value)),
        )
        if whole == before:
            return stats, whole
        before = whole
    raise TransportError(f"packets are still moving after the end of the training: {before}")


def grown(warm: Sequence[Mapping[str, Any]], last: Sequence[Mapping[str, Any]], part: str) -> dict[str, int]:
    """By how much a part of all ranks' statistics has grown since the warm-up, summed by name, largest first."""
    sums: dict[str, int] = {}
    for before, after in zip(warm, last, strict=True):
        for name, count in after[part].items():
            sums[name] = sums.get(name, 0) + count - before[part].get(name, 0)
    return dict(sorted(((n, c) for n, c in sums.items() if c), key=lambda item: -item[1]))


def drift(weights: Sequence[NDArray[np.float32]]) -> float:
    """Largest distance of a replica from the mean of all, relative to the length of that mean ([n] each)."""
    mean = np.mean(np.stack(weights), axis=0, dtype=np.float64)
    return float(max(np.linalg.norm(w - mean) for w in weights) / np.linalg.norm(mean))


def figures(record: Record) -> dict[str, Any]:
    """Reports of a training."""
    ms, accuracies = [1e3 * seconds for seconds in record.iterations], [accuracy for _, accuracy in record.points]
    return {
        "accuracy": accuracies[-1],
        # at a constant learning rate a single look swings by a point or two
        "settled_accuracy": fmean(accuracies[-_LAST_LOOKS:]),
        "iter_p50_ms": percentile(ms, 50),
        "iter_p99_ms": percentile(ms, 99),
        "iter_max_ms": max(ms),
        "time_to_accuracy_s": record.time_to(TARGET),
        "training_s": record.seconds,
    }


def summarize(records: Records, drifts: dict[str, float], spec: LabSpec, steps_planned: int) -> dict[str, Any]:
    """The content of ``summary.json``."""
    ours, theirs = records.curves["tailbound"], records.curves["gloo"]
    counters = grown(records.warm, records.last, "counters")
    expected = counters.get("rows_expected", 0)
    summed = sum(int(one["rows_summed"]) for one in records.last)
    return {
        "datapath": records.datapath,
        **figures(ours),
        **{f"gloo_{name}": value for name, value in figures(theirs).items()},
        "rows_summed_in_kernel": summed if records.datapath == "xdp" else 0,
        "rows_summed": summed,
        "delivered": counters.get("rows_delivered", 0) / expected if expected else 1.0,
        "ops": counters.get("ops", 0),
        "ops_incomplete": counters.get("ops_incomplete", 0),
        "deadline_hits": counters.get("seal_deadline_hits", 0) + counters.get("result_deadline_hits", 0),
        "drops": grown(records.warm, records.last, "drops"),
        "ledger_balanced": records.ledger.balanced,
        "ledger": records.ledger.as_dict(),
        "replica_drift": drifts["tailbound"],
        "gloo_replica_drift": drifts["gloo"],
        "workers": spec.workers,
        "steps": len(ours.iterations),
        "steps_planned": steps_planned,
        "stopped_by_time": len(ours.iterations) < steps_planned,
        "batch_per_worker": _BATCH,
        "rate": spec.rate,
        "loss": spec.loss,
        "burst_loss": spec.burst.loss if spec.burst else 0.0,
        "burst_length": spec.burst.length if spec.burst else None,
        "wire": spec.wire_size,
        "straggler": str(spec.straggler),
        "seed": SEED,
        "cpu_seconds_by_rank": records.cpu_seconds,
        "host": {"cpus": os.cpu_count(), "machine": platform.machine(), "kernel": platform.release()},
        "curves": {
            name: {"seconds": [s for s, _ in one.points], "accuracy": [a for _, a in one.points], "end_s": one.ends}
            for name, one in records.curves.items()
        },
    }
