"""Tailbound in turn with itself, while nothing slows its senders down."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import torch.distributed as dist

from tailbound.collective.op import Outcome
from tailbound.transport.pace import Pacer
from tailbound_lab.bench import allreduce
from tailbound_lab.bench.meter import Meter
from tailbound_lab.bench.worker import Contest, _Unpaced, measure

SECOND = 1_000_000_000


def test_nothing_slows_it_down_and_its_other_half_hears_of_all_that_changes() -> None:
    paced = Pacer([1, 2], speed=1.25e7, most=1.25e7)
    unpaced = _Unpaced(paced)
    unpaced.grant(1, 0.5)
    unpaced.follow(1.25e6)
    unpaced.among(1)
    for _ in range(3):
        unpaced.observe(2, 20_000_000, 100_000, 1.0, SECOND)
    assert unpaced.limited == set()
    assert unpaced.bursts(32, 1472, 1, SECOND) == 32
    assert unpaced.largest(1472) == 44
    assert paced.limited == {1}
    assert paced.rate(1) == 1.25e6 / 2
    assert paced.paths[1].peers == 1


def test_each_way_has_its_own_rows_and_deadlines(tmp_path: Path) -> None:
    """One communicator does both; here every other all-reduce loses rows."""
    outcomes = cycle([Outcome(expected=100, delivered=100), Outcome(expected=100, delivered=90, deadline_hits=1)])
    ours, line, channel = Mock(config=SimpleNamespace(rank=0, ranks=1)), Mock(), Mock()
    ours.allreduce.side_effect = lambda *_: Mock(result=lambda: next(outcomes))
    ours.job.flow.queue.pacer = Pacer([])
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        contest = Contest(4000, ours, line, Meter(kernel=False))
        measure({"vs": ["unpaced"], "warmup": 1, "iters": 1}, 4000, contest, channel)
    finally:
        dist.destroy_process_group()
    report = channel.report.call_args.kwargs
    about = dict.fromkeys(("rate", "loss", "burst_loss", "straggler")) | {"lab": True, "wire": False}
    rows = allreduce.summarize(4000, [report, report], about, {"tailbound": "xdp", "unpaced": "xdp"})
    told = {row["name"]: (row["delivered"], row["deadline_hits"]) for row in rows}
    assert told == {"tailbound": (1.0, 0), "unpaced": (0.9, 2)}
