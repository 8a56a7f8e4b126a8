"""Draws what happens in a case: ``PYTHONPATH=tests python -m sim.draw CASE [RANKS] [FILE]``.

Cases: calm, dies, link, join, slow, stop, hold, loss. Needs matplotlib (extra ``plots``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from sim.cases import Case, crash, slow_link, stop
from tailbound_lab.simulate.fabric import MS, S

CASES: dict[str, Callable[[int], Case]] = {
    "calm": lambda n: Case(n),
    "dies": lambda n: Case(n, at={(n - 1, 16): crash(n - 1)}),
    "link": lambda n: Case(n, steps=44, at={(0, 16): slow_link(n - 1, 0.05), (0, 30): slow_link(n - 1, 1.0)}),
    "join": lambda n: Case(n, joins={0: 16}),
    "slow": lambda n: Case(n, slow={n - 1: 1.5}),
    "stop": lambda n: Case(n, steps=50, at={(0, 16): stop(n - 1, S)}),
    "hold": lambda n: Case(n, pauses={(0, 16): 2 * S}),
    "loss": lambda n: Case(n, loss=0.01),
}


def draw(name: str, ranks: int, path: str) -> None:
    """Runs a case and writes a picture: op times, missing rows and D1 over time, by rank."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    case = CASES[name](ranks).run()
    figure, (times, missing, deadline) = pyplot.subplots(3, 1, figsize=(11, 9), sharex=True)
    for node in case.nodes:
        when = [(op.finished - S) / S for op in node.over]
        label = f"rank {node.rank}"
        times.plot(when, [(op.finished - op.launched) / MS for op in node.over], ".-", label=label)
        missing.plot(when, [100 * sum(op.missing_of.values()) / max(1, op.expected) for op in node.over], ".-")
        deadline.plot(when, [op.deadline / MS for op in node.over], ".-")
    times.set(ylabel="launch to end, ms", yscale="symlog", title=f"{name}, {ranks} ranks")
    times.legend(loc="upper left")
    missing.set(ylabel="rows missing, %")
    deadline.set(ylabel="D1 advertised, ms", yscale="log", xlabel="s")
    figure.tight_layout()
    figure.savefig(path)


def main(arguments: list[str]) -> int:
    """The command line."""
    if not arguments or arguments[0] not in CASES:
        print(f"usage: python -m sim.draw {'|'.join(CASES)} [RANKS] [FILE]", file=sys.stderr)
        return 2
    name, ranks = arguments[0], int(arguments[1]) if len(arguments) > 1 else 4
    path = arguments[2] if len(arguments) > 2 else f"{name}-{ranks}.png"
    draw(name, ranks, path)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
