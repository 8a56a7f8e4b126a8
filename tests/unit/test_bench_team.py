"""Worker processes of a benchmark: reports, orders, the rank that failed first, nobody left behind."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tailbound.errors import CapabilityError, ConfigError, TransportError
from tailbound_lab.bench import places
from tailbound_lab.bench.places import Loopback, needs_lab, open_place
from tailbound_lab.bench.start import StartLine
from tailbound_lab.bench.team import Team
from tailbound_lab.lab.spec import Burst, LabSpec, Straggler

WORKER = """
import os, sys, time
from tailbound_lab.bench.channel import serve
from tailbound.errors import ConfigError

def work(job, channel):
    rank = int(os.environ["RANK"])
    print(f"hello {job['word']}", flush=True)
    channel.report("ready", pid=os.getpid(), ranks=int(os.environ["WORLD_SIZE"]))
    if rank == job.get("raises"):
        raise ConfigError("no such thing")
    if rank == job.get("dies"):
        os.kill(os.getpid(), 9)
    if rank == job.get("ends"):
        return
    while order := channel.order():
        if order == "go":
            return
        channel.report("echo", order=order, rank=rank)

if __name__ == "__main__":
    sys.exit(serve(work))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loopback]:
    (tmp_path / "bench_team_worker.py").write_text(WORKER)
    package = Path(places.__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(package)]))
    with Loopback(LabSpec(3)) as loopback:
        yield loopback


def team(place: Loopback, text: io.StringIO, **job: object) -> Team:
    return Team(place, "bench_team_worker", {"word": "world", **job}, Console(file=text, width=200), silence=30)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_reports_orders_and_output(place: Loopback) -> None:
    text = io.StringIO()
    with team(place, text) as workers:
        ready = dict(workers.gather("ready"))
        assert {message["ranks"] for message in ready.values()} == {3}
        workers.tell("what")
        echoes = list(workers.gather("echo"))
        assert sorted(m["rank"] for _, m in echoes) == sorted(r for r, _ in echoes) == [0, 1, 2]
        workers.tell("go")
        workers.finish()
    assert sorted(text.getvalue().splitlines()) == [f"[{rank}] hello world" for rank in range(3)]


def test_the_error_of_a_rank_names_it(place: Loopback) -> None:
    with (
        team(place, io.StringIO(), raises=1) as workers,
        pytest.raises(TransportError, match="rank 1 failed: ConfigError: no such thing"),
    ):
        list(workers.gather("never"))


def test_a_killed_rank_is_named(place: Loopback) -> None:
    with (
        team(place, io.StringIO(), dies=2) as workers,
        pytest.raises(TransportError, match="rank 2 was killed by signal 9"),
    ):
        list(workers.gather("never"))


def test_a_rank_that_ends_too_early_is_named(place: Loopback) -> None:
    with (
        team(place, io.StringIO(), ends=0) as workers,
        pytest.raises(TransportError, match="rank 0 ended too early with status 0"),
    ):
        list(workers.gather("never"))


def test_nobody_is_left_behind(place: Loopback) -> None:
    pids: list[int] = []

    def interrupted() -> None:
        with team(place, io.StringIO()) as workers:
            pids.extend(message["pid"] for _, message in workers.gather("ready"))
            assert all(alive(pid) for pid in pids)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(pids) == 3
    assert not any(alive(pid) for pid in pids)


def test_silence_is_an_error(place: Loopback) -> None:
    with (
        Team(place, "bench_team_worker", {"word": "x"}, Console(file=io.StringIO()), silence=1) as workers,
        pytest.raises(TransportError, match="said nothing for 1 s"),
    ):
        list(workers.gather("never"))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (LabSpec(2, rate=10**9), ["a rate"]),
        (LabSpec(2, burst=Burst(0.01), wire=True), ["faults", "wire-size packets"]),
        (LabSpec(2, mtu=9000), ["another MTU"]),
        (LabSpec(2, straggler=Straggler(1, 5, None)), []),
    ],
)
def test_loopback_refuses_what_only_a_lab_has(spec: LabSpec, words: list[str]) -> None:
    assert needs_lab(spec) == words
    if words:
        with pytest.raises(CapabilityError, match=f"{words[0]}.*root"):
            Loopback(spec)
    else:
        assert Loopback(spec).environment(1)["TAILBOUND_LAB_STRAGGLER"] == "1:5:step"


def test_without_root_loopback_takes_the_place_of_the_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailbound_lab.lab.cluster.has_capability", lambda *names: False)
    with open_place(LabSpec(2), "auto") as (place, why_not):
        assert isinstance(place, Loopback)
        assert why_not is not None
        assert "root" in why_not
    for spec, datapath in ((LabSpec(2), "xdp"), (LabSpec(2, loss=0.1), "auto")):
        with pytest.raises(CapabilityError, match="root"), open_place(spec, datapath):
            pass


def test_one_worker_has_nobody_to_average_with() -> None:
    with pytest.raises(ConfigError, match="at least 2 workers"), open_place(LabSpec(1), "auto"):
        pass


def test_all_start_together_and_again(tmp_path: Path) -> None:
    path = tmp_path / "line"
    StartLine.create(path, 3)
    starts: list[list[int]] = [[], [], []]

    def rank(number: int) -> None:
        line = StartLine(path, number, 3, timeout=20)
        for _ in range(20):
            starts[number].append(line.wait())

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert starts[0] == starts[1] == starts[2]
    assert (np.diff(starts[0]) > 0).all()
    assert len(starts[0]) == 20


def test_who_did_not_come_to_the_start_is_named(tmp_path: Path) -> None:
    path = tmp_path / "line"
    StartLine.create(path, 2)
    with pytest.raises(TransportError, match="rank 1 did not come"):
        StartLine(path, 0, 2, timeout=0.05).wait()
    with pytest.raises(TransportError, match="rank 0 did not give the start"):
        StartLine(path, 1, 2, timeout=0.05).wait()
