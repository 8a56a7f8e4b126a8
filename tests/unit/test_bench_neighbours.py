"""``tailbound bench neighbours``: when a phase ends, what jobs share, and what is refused before anything is built."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tailbound import prepare
from tailbound.errors import ConfigError
from tailbound_lab.bench import neighbours
from tailbound_lab.bench.neighbours import Wanted
from tailbound_lab.bench.tcp import check_congestion
from tailbound_lab.simulate import beside
from tailbound_lab.simulate.neighbours import Shares


class Ours:
    """A communicator whose ops end at once."""

    def __init__(self, rank: int, step: int = 0, behind: int = 0) -> None:
        self.config, self.step, self.behind = SimpleNamespace(rank=rank), step, behind
        self.data: list[np.ndarray[Any, Any]] = []

    def allreduce(self, data: np.ndarray[Any, Any], _: np.ndarray[Any, Any]) -> Future[Any]:
        self.step, self.behind = self.step + 1, max(0, self.behind - 1)
        self.data.append(data)
        done: Future[Any] = Future()
        done.set_result(SimpleNamespace(error=None, expected=1, delivered=1, deadline_hits=0))
        return done

    def drain(self) -> bool:
        return True

    def stats(self) -> dict[str, Any]:
        return {"ledger": {}, "lost_on_arrival": {}}


JOB = {"apart_ms": 0.0, "size": 64, "seed": 1, "ranks": 2}


@pytest.mark.needs("torch")
def test_a_phase_ends_at_one_step_although_rank_0_is_behind() -> None:
    from tailbound_lab.bench.neighbours_worker import _AHEAD, _Rank

    last = np.zeros(1, np.uint64)
    slow, fast = Ours(0, step=3, behind=40), Ours(1, step=43)
    report = _Rank(JOB, 0, slow, last).phase({"ops": 0, "seconds": -1.0})  # type: ignore[arg-type]
    _Rank(JOB, 0, fast, last).phase({"ops": 0, "seconds": -1.0})  # type: ignore[arg-type]
    assert slow.step == fast.step == 43 + _AHEAD
    assert len(report["took"]) == 40 + _AHEAD
    further = Ours(1, step=60)
    assert len(_Rank(JOB, 0, further, last).phase({"ops": 0, "seconds": -1.0})["took"]) == 1  # type: ignore[arg-type]


@pytest.mark.needs("torch")
def test_two_jobs_have_pauses_and_data_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from tailbound_lab.bench.neighbours_worker import _Rank

    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    jobs = [Ours(rank) for _ in range(2) for rank in range(2)]
    for number, ours in enumerate(jobs):
        one = _Rank({**JOB, "apart_ms": 5.0}, number // 2, ours, np.zeros(1, np.uint64))  # type: ignore[arg-type]
        one.phase({"ops": 1})
    assert len(set(pauses)) == 4
    assert len({ours.data[0].tobytes() for ours in jobs}) == 4


class Quiet:
    """A team whose ranks report at once."""

    def __init__(self, *_: Any, **how: Any) -> None:
        self.orders: list[str] = []
        self.silence: float = how.get("silence", 0.0)

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def tell(self, order: str) -> None:
        self.orders.append(order)

    def gather(self, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
        yield 0, {"kind": kind, "datapath": "udp", "result": "unicast", "cpu_seconds": 0.0}

    def finish(self) -> None:
        pass


def test_a_long_row_is_no_silence_and_warm_up_reports_often(monkeypatch: pytest.MonkeyPatch) -> None:
    teams: list[Quiet] = []

    def team(*_: Any, **how: Any) -> Quiet:
        teams.append(Quiet(**how))
        return teams[-1]

    monkeypatch.setattr(neighbours, "Cluster", Quiet)
    monkeypatch.setattr(neighbours, "Team", team)
    with neighbours._bench(Wanted(seconds=1000.0), True, Console(file=io.StringIO()), 2):
        assert teams[0].silence > 1000
        assert [order.count('"ops": 5') for order in teams[0].orders] == [1] * 5


def test_a_congestion_control_that_is_not_here_is_named_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_congestion(["reno"])
    monkeypatch.setattr(prepare, "compile_all", lambda: pytest.fail("something was built"))
    with pytest.raises(ConfigError, match=r"'nobodys' here .*: take one of .*reno"):
        neighbours.run(Wanted(congestion=("nobodys",)), console=Console(file=io.StringIO()))
    with pytest.raises(ConfigError, match="the simulator's TCP is reno"):
        beside.run(Wanted(congestion=("reno", "cubic")))


def test_a_share_of_a_job_is_of_the_job_alone_with_the_same_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(marked: bool, tcp: str | None) -> dict[str, Any]:
        ops = (20.0 if marked else 10.0) / (2 if tcp else 1)
        return {"case": "job, TCP" if tcp else "job", "tcp": tcp, "ops": [ops], "rows": 1}

    monkeypatch.setattr(prepare, "compile_all", lambda: None)
    monkeypatch.setattr(neighbours, "_tcp", lambda _, marked, __: [row(marked, None), row(marked, "reno")])
    rows = neighbours.run(Wanted(), cases=["tcp"], console=Console(file=io.StringIO()))
    assert [row["job_share"] for row in rows] == [None, 0.5, None, 0.5]

    def share(*_: Any, known: bool, tcp: int = 0, **__: Any) -> Shares:
        return Shares([(20.0 if known else 10.0) / (1 + tcp)], [1.0], [0.5] * tcp)

    monkeypatch.setattr(beside, "share", share)
    rows = beside.run(Wanted(), cases=["tcp"], console=Console(file=io.StringIO()))
    assert [row["job_share"] for row in rows if row["tcp"]] == [0.5] * 4


def test_no_op_that_ends_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "share", lambda *_, **__: Shares([0.0, 0.0], [None, None], []))
    row, *_ = beside.run(Wanted(), cases=["jobs"], console=Console(file=io.StringIO()))
    assert row["jain"] is None
    assert row["p50_ms"] is None
