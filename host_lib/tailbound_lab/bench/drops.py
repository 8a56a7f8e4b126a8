"""``tailbound bench drops``: what lost packets do to training, by share, pattern and rotation; what cutting gains.

Trainings are of ``drops_train``, all for the same number of steps, a process for every processor. The time that is
gained by going on without what is late is the model of ``cut``.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tailbound.errors import CapabilityError
from tailbound_lab.bench import cut, picture
from tailbound_lab.bench.drops_plan import MODELS, SHARES, Case, means, plan
from tailbound_lab.bench.drops_plot import draw
from tailbound_lab.bench.save import save

#: Ways to cut a half short.
_CUTS = (
    *(cut.Cut(share=share) for share in SHARES),
    *(cut.Cut(patience=patience * cut.HALF) for patience in (1.0, 1.1, 1.25, 1.5, 2.0)),
)
_TAILS = (1.5, 3.0)


def train(case: Case, steps: int) -> dict[str, Any]:
    """One training, in a process of its own."""
    from tailbound_lab.bench import drops_train

    found = drops_train.train(case.model, case.pattern, case.share, rotate=case.rotate, seed=case.seed, steps=steps)
    return {"kind": "training", **found}


def run(
    *,
    models: Sequence[str] = MODELS,
    shares: Sequence[float] = SHARES,
    seeds: int = 2,
    steps: int = 0,
    json_file: Path | None = None,
    plot: Path | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Trains, prints tables, writes ``json_file`` and the picture; returns the rows.

    Args:
        models: of ``MODELS``.
        shares: of all packets.
        seeds: how many, each of data, weights and losses.
        steps: of every training; 0: the model's own number.
        json_file: where the rows go.
        plot: where the picture goes; None: beside ``json_file``, if there is one and matplotlib is there.
        console: where tables go.

    Raises:
        ConfigError, CapabilityError: what is asked for cannot be had here, or an extra is missing.
    """
    console = console or Console()
    cases = plan(models, shares, seeds)
    try:
        from tailbound_lab.bench import digits  # noqa: F401
    except ModuleNotFoundError as error:
        raise CapabilityError(f"training needs {error.name}: pip install 'tailbound-lab[demo]'") from error
    plot = picture.where(plot, json_file, console)
    rows = list(_trained(cases, steps, console))
    for model in models:
        console.print(table([row for row in rows if row["model"] == model]))
    gains = cut.rows(_TAILS, _CUTS)
    console.print(gains_table(gains))
    rows += gains
    save(rows, json_file)
    picture.write(draw, rows, plot, console)
    return rows


def _trained(cases: Sequence[Case], steps: int, console: Console) -> Iterator[dict[str, Any]]:
    """Rows in the order of ``cases``."""
    processes = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(min(len(cases), os.cpu_count() or 1), mp_context=processes) as pool,
        Progress(console=console, disable=not console.is_terminal, transient=True) as progress,
    ):
        futures = [pool.submit(train, case, steps) for case in cases]
        task = progress.add_task("trainings", total=len(cases))
        try:
            for future in as_completed(futures):
                future.result()
                progress.advance(task)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        yield from (future.result() for future in futures)


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One model's: a line for each pattern and share, rotated and not; means over seeds."""
    seeds = len({row["seed"] for row in rows})
    title = f"{rows[0]['model']}: {rows[0]['steps']} steps, {seeds} seeds; worst of four replicas, rotation on and off"
    result = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    headings = ("lost\n", "where\n", "test loss\non", "\noff", "accuracy\non", "\noff", "drift\non", "\noff")
    for heading in headings:
        result.add_column(heading, justify="left" if heading == "where\n" else "right", no_wrap=True)
    found = means(rows, "test_loss", "accuracy", "drift")
    for pattern, share in dict.fromkeys((pattern, share) for pattern, share, _ in found):
        on, off = found[pattern, share, True], found[pattern, share, False]
        told = []
        for at, form in enumerate(("{:.3f}", "{:.1%}", "{:.1%}")):
            told += [form.format(on[at]), form.format(off[at])]
        result.add_row(f"{share:.0%}", pattern if share else "", *told)
    return result


def gains_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What cutting gains: a line for each tail and cut."""
    title = "going on without what is late (model): how many times shorter than waiting for all"
    result = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("tail", "a half ends", "gone without", "mean", "P99"):
        result.add_column(heading, justify="left" if heading == "a half ends" else "right", no_wrap=True)
    for row in rows:
        when = f"without {row['share']:.0%}" if row["patience"] is None else f"after {row['patience']:g} of its time"
        numbers = (f"{row['lost']:.1%}", f"{row['mean']:.2f}", f"{row['p99']:.2f}")
        result.add_row(f"{row['tail']:g}", when, *numbers)
    return result
