"""Free phases of a contest, as ``bench neighbours`` has them: when one ends; shares of jobs, and what is refused."""

from __future__ import annotations

import io
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from rich.console import Console

from tailbound.errors import ConfigError
from tailbound_lab.bench import contest, experiment, neighbours
from tailbound_lab.bench.contest import _AHEAD, Contest
from tailbound_lab.bench.neighbours import Wanted
from tailbound_lab.bench.stopwatch import Stopwatch
from tailbound_lab.bench.tcp import check_congestion


class Ours:
    """A communicator whose ops end at once."""

    def __init__(self, rank: int, step: int = 0, behind: int = 0) -> None:
        self.config, self.step, self.behind = SimpleNamespace(rank=rank, ranks=2), step, behind
        learned = SimpleNamespace(largest=0, stage_one=lambda _: 0, stage_two=lambda _: 0)
        self.job = SimpleNamespace(keys=None, deadlines=learned)
        self.data: list[np.ndarray[Any, Any]] = []

    def allreduce(self, data: np.ndarray[Any, Any], _: np.ndarray[Any, Any]) -> Future[Any]:
        self.step, self.behind = self.step + 1, max(0, self.behind - 1)
        self.data.append(data)
        done: Future[Any] = Future()
        done.set_result(SimpleNamespace(error=None))
        return done

    def drain(self) -> bool:
        return True

    def stats(self) -> dict[str, Any]:
        return {"ledger": {}, "lost_on_arrival": {}, "counters": {}, "event_counts": {}, "drops": {}}


def member(ours: Ours, last: np.ndarray[Any, Any], number: int = 0) -> Contest:
    return Contest({"seed": 1}, Mock(), ours, Mock(), last, Stopwatch(), number)  # type: ignore[arg-type]


def test_a_free_phase_ends_at_one_step_although_rank_0_is_behind() -> None:
    last = np.zeros(1, np.uint64)
    slow, fast, further = Ours(0, step=3, behind=40), Ours(1, step=43), Ours(1, step=60)
    for ours in (slow, fast, further):
        member(ours, last).phase(size=64, seconds=-1.0, free=True)
    assert slow.step == fast.step == 43 + _AHEAD
    assert len(slow.data) == 40 + _AHEAD
    assert len(further.data) == 1


def test_two_jobs_have_pauses_and_data_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(contest.time, "sleep", pauses.append)
    jobs = [Ours(rank) for _ in range(2) for rank in range(2)]
    for number, ours in enumerate(jobs):
        member(ours, np.zeros(1, np.uint64), number // 2).phase(size=64, rounds=1, free=True, apart=5e-3)
    assert len(set(pauses)) == 4
    assert len({ours.data[0].tobytes() for ours in jobs}) == 4


def test_a_congestion_control_that_is_not_here_is_named_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_congestion(["reno"])
    monkeypatch.setattr(experiment, "compile_all", lambda: pytest.fail("something was built"))
    with pytest.raises(ConfigError, match=r"'nobodys' here .*: take one of .*reno"):
        neighbours.run(Wanted(congestion=("nobodys",)), console=Console(file=io.StringIO()))


def test_a_share_of_a_job_is_of_the_job_alone_with_the_same_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(marked: bool, tcp: str | None) -> dict[str, Any]:
        ops = (20.0 if marked else 10.0) / (2 if tcp else 1)
        return {"case": "job, TCP" if tcp else "job", "tcp": tcp, "ops": [ops], "rows": 1}

    monkeypatch.setattr(neighbours, "_tcp", lambda _, marked, __: [row(marked, None), row(marked, "reno")])
    rows = neighbours.run(Wanted(), cases=["tcp"], console=Console(file=io.StringIO()))
    assert [row["job_share"] for row in rows] == [None, 0.5, None, 0.5]
