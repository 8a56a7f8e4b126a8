"""What the demo says: progress while it runs, the table and the picture at the end."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tailbound.bench.curve import TARGET, Curve
from tailbound.lab.spec import LabSpec

_LABELS = {"tailbound": "Tailbound", "gloo": "Gloo"}


def host() -> dict[str, Any]:
    """What the figures were measured on."""
    return {"cpus": os.cpu_count(), "machine": platform.machine(), "kernel": platform.release()}


def conditions(console: Console, spec: LabSpec, why_not: str | None) -> None:
    """Says what is about to run where."""
    if why_not is None:
        console.print(f"{spec.workers} workers in network namespaces, {describe(spec)}", highlight=False)
        return
    console.print(f"No lab: {why_not}", style="yellow", highlight=False, soft_wrap=True)
    console.print(
        f"{spec.workers} workers as plain processes on loopback, over udp, {describe(spec)}. As root the demo builds a "
        "network of namespaces, loses 1 % of all packets in bursts, and has the kernel sum the gradients (xdp).",
        highlight=False,
        soft_wrap=True,
    )


def describe(spec: LabSpec) -> str:
    """The conditions in words."""
    loss = f"{spec.burst.loss:.0%} of packets lost in bursts" if spec.burst else "no losses"
    if spec.straggler is None:
        return loss
    return f"{loss}, rank {spec.straggler.rank} computes {spec.straggler.ms:g} ms longer every step"


@contextmanager
def progress(console: Console, steps: int) -> Iterator[Callable[[str, Curve], None]]:
    """Bars on a terminal, a line every eighth of the way elsewhere; yields what to call after every look."""
    if not console.is_terminal:
        told = dict.fromkeys(_LABELS, 0)

        def line(name: str, curve: Curve) -> None:
            done = len(curve.iterations)
            if 8 * (done - told[name]) < steps and done < steps:
                return
            told[name] = done
            console.print(
                f"{_LABELS[name]:>9}: {done} steps in {curve.seconds:.1f} s, accuracy {curve.accuracy:.1%}",
                highlight=False,
            )

        yield line
        return
    columns = (
        TextColumn("{task.description:>9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        tasks = {name: bars.add_task(_LABELS[name], total=steps, state="starting") for name in _LABELS}

        def advance(name: str, curve: Curve) -> None:
            state = f"accuracy {curve.accuracy:6.1%} after {curve.seconds:5.1f} s of training"
            bars.update(tasks[name], completed=len(curve.iterations), state=state)

        yield advance


def results(console: Console, summary: dict[str, Any], out: Path) -> None:
    """The table at the end."""
    table = Table(box=SIMPLE_HEAD, title_justify="left", title=f"{summary['steps']} steps of the same training")
    table.add_column("")
    table.add_column(f"Tailbound ({summary['datapath']})", justify="right")
    table.add_column("Gloo (tcp)", justify="right")
    for words, name, form in (
        ("accuracy, worst replica", "accuracy", "{:.1%}"),
        (f"seconds to {TARGET:.0%}", "time_to_accuracy_s", "{:.2f}"),
        ("seconds of training", "training_s", "{:.1f}"),
        ("iteration p50, ms", "iter_p50_ms", "{:.1f}"),
        ("iteration p99, ms", "iter_p99_ms", "{:.1f}"),
        ("longest iteration, ms", "iter_max_ms", "{:.1f}"),
        ("drift of replicas", "replica_drift", "{:.1e}"),
    ):
        values = (summary[name], summary[f"gloo_{name}"])
        table.add_row(words, *("never" if value is None else form.format(value) for value in values))
    table.add_section()
    ledger = summary["ledger"]
    table.add_row("rows delivered", f"{summary['delivered']:.3%}", "100%")
    table.add_row("rows summed in the kernel", f"{summary['rows_summed_in_kernel']:,}", "")
    table.add_row("deadline hits", f"{summary['deadline_hits']:,}", "")
    table.add_row("packets sent", f"{ledger['sent']:,}", "")
    if summary["lab"]:
        table.add_row("lost on the cables", f"{ledger['lost_on_purpose']:,}", "")
    for reason, count in summary["drops"].items():
        table.add_row(f"dropped: {reason.lower().replace('_', ' ')}", f"{count:,}", "")
    balanced = "yes" if summary["ledger_balanced"] else f"no, {ledger['difference']:+,} packets"
    table.add_row("every packet accounted for", balanced, "")
    console.print(table)
    if summary["stopped_by_time"]:
        console.print("The time was over before all epochs were: both made the same steps.", style="yellow")
    console.print(f"{out / 'demo.png'}, {out / 'summary.json'}", highlight=False, soft_wrap=True)


def picture(curves: dict[str, Curve], summary: dict[str, Any], path: Path) -> None:
    """Draws the picture with its two lines of words."""
    from tailbound.demo.picture import draw

    ratio = summary["gloo_training_s"] / summary["training_s"]
    faster = f"{ratio:.1f}x faster than Gloo" if ratio >= 1 else f"{1 / ratio:.1f}x slower than Gloo"
    place = "lossy links" if summary["lab"] else "loopback"
    loss = f"{summary['burst_loss']:.0%} bursty loss" if summary["burst_loss"] else "no loss"
    words = (
        f"{summary['workers']} workers, {loss}, one straggler ({summary['straggler'].split(':')[1]} ms a step), "
        f"{summary['steps']} steps each, datapath {summary['datapath']}, {summary['delivered']:.2%} of rows delivered"
    )
    draw(curves, f"Training on {place}: {faster}", words, path)
