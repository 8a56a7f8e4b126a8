"""The words of the demo: the lines that it prints, and the table at the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from tailbound_lab.bench import table
from tailbound_lab.bench.train_rows import TARGET
from tailbound_lab.lab.spec import LabSpec

#: Accuracies this close are called equal: one point, three or four of the 360 test images.
_EQUAL = 0.01


def say(console: Console, words: str) -> None:
    """Print a line as it is."""
    console.print(words, highlight=False, markup=False, soft_wrap=True)


def describe(spec: LabSpec) -> str:
    """The conditions in words."""
    assert spec.rate is not None
    assert spec.straggler is not None
    loss = f"{spec.burst.loss:.0%} of packets lost in bursts" if spec.burst else f"{spec.loss:.0%} of packets lost"
    late = f"rank {spec.straggler.rank} computes {spec.straggler.ms:g} ms longer in every step"
    return f"cables of {spec.rate / 1e9:g} Gbit/s, {loss}, {late}"


def headline(summary: Mapping[str, Any]) -> str:
    """The gain or loss in a line: mean time of a step, and settled accuracy of the worst replica."""
    ours, theirs = summary["settled_accuracy"], summary["gloo_settled_accuracy"]
    both = f"{ours:.1%} against {theirs:.1%}"
    right = f"equal accuracy ({both})" if abs(ours - theirs) <= _EQUAL else f"an accuracy of {both}"
    ratio = summary["gloo_training_s"] / summary["training_s"]
    if 0.95 < ratio < 1.05:
        return f"As fast per step as Gloo, at {right}"
    faster = f"{ratio:.1f} times faster" if ratio > 1 else f"{1 / ratio:.1f} times slower"
    return f"{faster} per step than Gloo, at {right}"


def results(console: Console, summary: dict[str, Any], out: Path) -> None:
    """The table at the end."""
    console.print()
    console.print(headline(summary), style="bold", highlight=False, soft_wrap=True)
    rows: list[tuple[str, ...]] = []
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
        rows.append((words, *("never" if value is None else form.format(value) for value in values)))
    ledger = summary["ledger"]
    counts = {
        "rows summed in the kernel": summary["rows_summed_in_kernel"],
        "deadline hits": summary["deadline_hits"],
        "packets sent": ledger["sent"],
        "lost on the cables": ledger["lost_on_purpose"],
        **{f"dropped: {reason.lower().replace('_', ' ')}": count for reason, count in summary["drops"].items()},
    }
    rows.append(("rows delivered", f"{summary['delivered']:.3%}", "100%"))
    rows += [(words, f"{count:,}", "") for words, count in counts.items()]
    balanced = "yes" if summary["ledger_balanced"] else f"no, {ledger['difference']:+,} packets"
    rows.append(("every packet accounted for", balanced, ""))
    heads = f"{summary['steps']} steps of the same training", f"Tailbound ({summary['datapath']})", "Gloo (tcp)"
    table.show("", [dict(zip(heads, row, strict=True)) for row in rows], console=console)
    if summary["stopped_by_time"]:
        console.print("The time was over before all epochs were: both made the same steps.", style="yellow")
    console.print(f"{out / 'demo.png'}, {out / 'summary.json'}", highlight=False, soft_wrap=True)


def words(summary: Mapping[str, Any], spec: LabSpec) -> str:
    """What the picture says below its headline: conditions, and what was measured."""
    return (
        f"{summary['workers']} workers, {describe(spec)}\n"
        f"{summary['steps']} steps each, in turn; datapath {summary['datapath']}, "
        f"{summary['delivered']:.2%} of rows delivered"
    )
