"""``tailbound simulate --confirm``: the same all-reduces in the lab and in the simulator, and how near they are.

What is compared is the network and what the engine makes of it, so the rate is so low that two cores, which all ranks
of the lab share, have little to do: more ranks have slower links. Both have the lab's buffers and token buckets
(``as_in_the_lab``), the ``udp`` datapath, engines that know the links' speed, the same rest before every step, and the
same losses and foreign bursts, which come at other moments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tailbound.errors import ConfigError
from tailbound_lab.bench import allreduce
from tailbound_lab.bench.save import save
from tailbound_lab.lab.build import RateLimit
from tailbound_lab.lab.spec import Background, LabSpec
from tailbound_lab.simulate.fabric import S
from tailbound_lab.simulate.ports import Switching
from tailbound_lab.simulate.run import Wanted, as_in_the_lab, simulate, summarise
from tailbound_lab.simulate.steps import Step

RANKS = (4, 8)
#: Bytes of float32, and bit/s of all links together.
_SIZE, _RATES = 512 << 10, 8 * 10**7
#: Steps before those that count, and the rest before each over the time in which the token buckets fill.
_WARM, _REST = 10, 1.5
#: Relative difference of times, and factor between shares of rows that stayed lost, that count as the same.
NEAR, FACTOR = 0.15, 1.5
#: Shares below this are not told apart: a row in two thousand.
_NONE = 5e-4


class Trouble(NamedTuple):
    """What is wrong with the network.

    Attributes:
        name: for a table.
        loss: of packets.
        bursts: whether there are foreign ones, of 50 ms a second and rank at 0.9 of the rate.
    """

    name: str
    loss: float = 0.0
    bursts: bool = False

    def background(self, rate: int) -> Background | None:
        """The bursts at this rate, bit/s."""
        return Background(rate * 9 // 10, 50, 1000) if self.bursts else None


TROUBLES = (Trouble("calm"), Trouble("1 % lost", loss=0.01), Trouble("bursts", bursts=True))


def rate_of(ranks: int) -> int:
    """Of every link, bit/s."""
    return _RATES // ranks


def rest_of(rate: int) -> int:
    """Before every step, ns: so long that token buckets are full."""
    limit = RateLimit(rate)
    return int(_REST * limit.burst / limit.rate * S)


def run(
    *,
    ranks: Sequence[int] = RANKS,
    steps: int = 100,
    seed: int = 1,
    json_file: Path | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Runs both, prints a table, writes ``json_file`` after every case; returns its rows.

    Args:
        ranks: numbers of ranks.
        steps: that count, in either.
        seed: of losses and bursts.
        json_file: where the rows go.
        console: where tables go.

    Raises:
        ConfigError, CapabilityError: there can be no lab here.
        TransportError: a rank of the lab failed.
    """
    console = console or Console()
    if not ranks or max(ranks) > 16:
        raise ConfigError("give 16 ranks or fewer: more make processors decide in the lab")
    rows: list[dict[str, Any]] = []
    for number in ranks:
        for trouble in TROUBLES:
            rate = rate_of(number)
            spec = LabSpec(number, rate=rate, loss=trouble.loss, background=trouble.background(rate), seed=seed)
            (lab,) = allreduce.run(
                spec, sizes=[_SIZE], iters=steps, vs=(), datapath="udp", rest=rest_of(rate) / S, known=True,
                console=console,
            )  # fmt: skip
            rows.append(compared(number, trouble.name, lab, simulated(number, trouble, steps, seed)))
            save(rows, json_file)
    console.print(table(rows))
    return rows


def simulated(ranks: int, trouble: Trouble, steps: int, seed: int) -> dict[str, Any]:
    """A row of ``run.summarise``."""
    rate = rate_of(ranks)
    switching = as_in_the_lab(Switching(rate=rate, loss=trouble.loss, background=trouble.background(rate)))
    wanted = Wanted(
        size=_SIZE, switching=switching, steps=steps, warm=_WARM, seed=seed, rest=rest_of(rate),
        settings={"rate": rate / 8, "share_rows": True},
    )  # fmt: skip
    counted: list[Step] = []
    team, least = simulate(ranks, wanted, lambda step, counts: counted.append(step) if counts else None)
    return summarise(ranks, wanted, counted, least, team.arrangement.name)


def compared(ranks: int, trouble: str, lab: Mapping[str, Any], sim: Mapping[str, Any]) -> dict[str, Any]:
    """Both, and whether they are near."""
    lost = 1 - lab["delivered"], sim["rows_lost_percent"] / 100
    p50, p99 = (sim[key] / lab[key] for key in ("p50_ms", "p99_ms"))
    more, less = max(lost), min(lost)
    return {
        "ranks": ranks, "trouble": trouble, "bytes": lab["bytes"], "rate": lab["rate"],
        "lab_iters": lab["iters"], "simulated_steps": sim["steps"],
        "lab_p50_ms": lab["p50_ms"], "lab_p99_ms": lab["p99_ms"], "lab_lost": lost[0], "lab_cpu_ms": lab["cpu_ms"],
        "simulated_p50_ms": sim["p50_ms"], "simulated_p99_ms": sim["p99_ms"], "simulated_lost": lost[1],
        "p50_ratio": p50, "p99_ratio": p99, "lost_ratio": None if more < _NONE else more / less if less else None,
        "p50_near": abs(p50 - 1) <= NEAR, "p99_near": abs(p99 - 1) <= NEAR,
        "lost_near": more < _NONE or more <= FACTOR * less,
    }  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each case: the lab's, the simulator's, and their quotients; ``!`` where they are not near."""
    title = f"{rows[0]['bytes'] / 1024:g} KiB: lab, simulated, and their quotient"
    result = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("ranks,\nMbit/s", "trouble\n", "p50 ms\nlab", "\nsim", "\n/", "p99 ms\nlab", "\nsim", "\n/",
                    "rows lost\n% lab", "\nsim"):  # fmt: skip
        result.add_column(heading, justify="left" if heading == "trouble\n" else "right", no_wrap=True)
    for row in rows:
        told = []
        for key in ("p50", "p99"):
            told += [f"{row[f'lab_{key}_ms']:.1f}", f"{row[f'simulated_{key}_ms']:.1f}"]
            told.append(f"{row[f'{key}_ratio']:.2f}{'' if row[f'{key}_near'] else '!'}")
        lost = f"{100 * row['simulated_lost']:.3f}{'' if row['lost_near'] else '!'}"
        case = f"{row['ranks']}, {row['rate'] / 1e6:g}", row["trouble"]
        result.add_row(*case, *told, f"{100 * row['lab_lost']:.3f}", lost)
    return result
