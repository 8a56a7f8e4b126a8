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
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from tailbound_lab.bench.curve import TARGET, Curve
from tailbound_lab.bench.picture import Line, Panel, draw, shares
from tailbound_lab.bench.places import Place
from tailbound_lab.demo.summary import headline
from tailbound_lab.lab.spec import LabSpec

_LABELS = {"tailbound": "Tailbound", "gloo": "Gloo"}


def host() -> dict[str, Any]:
    """What the figures were measured on."""
    return {"cpus": os.cpu_count(), "machine": platform.machine(), "kernel": platform.release()}


class Steps:
    """The demo's steps, numbered: on a terminal with a spinner and the seconds, elsewhere a line each.

    Args:
        console: where they go.
        total: how many there are.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total, self._number = console, total, 0

    def say(self, words: str) -> None:
        """Begins a step that shows its own progress."""
        self._console.print(self._next(words), highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def step(self, words: str) -> Iterator[None]:
        """Does a step inside the block."""
        text = self._next(words)
        if not self._console.is_terminal:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
            yield
            return
        columns = (TextColumn("{task.description}", markup=False), SpinnerColumn("line"), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as bars:
            bars.add_task(text, total=None)
            yield

    def _next(self, words: str) -> str:
        self._number += 1
        return f"[{self._number}/{self._total}] {words}"


def conditions(console: Console, place: Place, why_not: str | None) -> None:
    """Says what is about to run where, and what is missing."""

    def say(words: str, style: str = "") -> None:
        console.print(words, style=style, highlight=False, soft_wrap=True)

    spec = place.spec
    if why_not is not None:
        say(f"No network of namespaces can be had: {why_not}", "yellow")
        say(f"The {spec.workers} workers are plain processes on loopback, over udp sockets; {describe(spec)}")
        return
    say(f"      {spec.workers} workers, a network namespace each; {describe(spec)}")
    if not place.xdp:
        say(
            "      Not root: in a user namespace, gradients arrive over udp sockets. As root the kernel sums "
            "them (xdp) and losses come in bursts."
        )


def describe(spec: LabSpec) -> str:
    """The conditions in words."""
    rate = f"cables of {spec.rate / 1e9:g} Gbit/s" if spec.rate is not None else "no rate"
    if spec.burst is not None:
        loss = f"{spec.burst.loss:.0%} of packets lost in bursts"
    else:
        loss = f"{spec.loss:.0%} of packets lost" if spec.loss else "no losses"
    if spec.straggler is None:
        return f"{rate}, {loss}"
    return f"{rate}, {loss}, rank {spec.straggler.rank} computes {spec.straggler.ms:g} ms longer in every step"


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
        BarColumn(24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        tasks = {name: bars.add_task(_LABELS[name], total=steps, state="starting") for name in _LABELS}

        def advance(name: str, curve: Curve) -> None:
            state = f"accuracy {curve.accuracy:6.1%} after {curve.seconds:5.1f} s"
            bars.update(tasks[name], completed=len(curve.iterations), state=state)

        yield advance


def results(console: Console, summary: dict[str, Any], out: Path) -> None:
    """The table at the end."""
    console.print()
    console.print(headline(summary), style="bold", highlight=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD)
    table.add_column(f"{summary['steps']} steps of the same training")
    table.add_column(f"Tailbound ({summary['datapath']})", justify="right")
    table.add_column("Gloo (tcp)", justify="right")
    for words, name, form in (
        ("accuracy, worst replica, mean of the last looks", "settled_accuracy", "{:.1%}"),
        ("accuracy, worst replica, last look", "accuracy", "{:.1%}"),
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


def picture(curves: dict[str, Curve], summary: dict[str, Any], spec: LabSpec, path: Path) -> None:
    """Draw accuracy over time and the time of an iteration, with two lines of words above them."""
    words = (
        f"{summary['workers']} workers, {describe(spec)}\n"
        f"{summary['steps']} steps each, in turn; datapath {summary['datapath']}, "
        f"{summary['delivered']:.2%} of rows delivered"
    )
    left = Panel("Accuracy over training time", "seconds of training", "test accuracy, worst replica (%)", top=109)
    head = "Time of an iteration: share that took at most this long"
    right = Panel(head, "milliseconds (log scale)", "iterations (%)", top=109, steps=True)
    for name, curve in curves.items():
        seconds, accuracy = zip(*curve.points, strict=True)
        reached = curve.time_to(TARGET)
        marks = [] if reached is None else [(reached, 100 * TARGET, f"{TARGET:.0%} after {reached:.1f} s")]
        left.lines.append(Line(name, seconds, [100 * one for one in accuracy], _LABELS[name], marks=marks))
        right.lines.append(shares(name, [1e3 * one for one in curve.iterations], "", percents=(50, 99)))
    draw([[left, right]], path, headline(summary), words)
