"""``tailbound bench neighbours`` in a lab, briefly; processes that are forked into one; TCP between two workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support import await_that
from tailbound.errors import ConfigError
from tailbound_lab.bench.tcp import Flow
from tailbound_lab.lab.cluster import Cluster

pytestmark = [pytest.mark.needs("root", "netns", "bpf", "bcc", "headers", "torch"), pytest.mark.timeout(120)]

BRIEFLY = """
import sys
from pathlib import Path
from tailbound_lab.bench import experiment, neighbours

experiment.compile_all = lambda: None  # what this is forked from has loaded it
neighbours.WARM_UP, neighbours._RAMP = 4, 0.1
wanted = neighbours.Wanted(ranks=3, few=2, size=1 << 16, rate=200_000_000, seconds=0.3, congestion=("reno",))
neighbours.run(wanted, cases=sys.argv[2:], marks=(True,), json_file=Path(sys.argv[1]))
"""
ROWS = {
    "tcp": [("job", None), ("TCP", "reno ECN"), ("job, TCP", "reno ECN"), ("TCP", "reno"), ("job, TCP", "reno")],
    "incast": [("incast", None)],
    "jobs": [("two jobs", None)],
}


@pytest.mark.parametrize(
    "case", ["incast", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("tcp", "jobs"))]
)
def test_every_case_gives_its_rows(
    case: str, start_script: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    file = tmp_path / "rows.json"
    process = start_script(BRIEFLY, str(file), case)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "busy" in out
    assert "…" not in out
    rows = json.loads(file.read_text())
    assert [(row["case"], row["tcp"]) for row in rows] == ROWS[case]
    for row in rows:
        assert 0 <= row["dropped"] < row["packets"]
        if row["case"] != "TCP":
            assert row["ops_done"] >= 1
            assert row["rows"] > 0
            assert row["rows_missing_percent"] == pytest.approx(row["rows_lost_percent"] + row["rows_late_percent"])
            assert row["datapath"] == ("udp" if case == "jobs" else "xdp")
        if row["tcp"] is not None:
            assert row["tcp_share"] > 0
            assert row["tcp_rtt_ms"] > 0
    if case == "jobs":
        assert rows[0]["jain"] > 0.5


def test_a_forked_process_is_in_its_worker_and_ends_like_any_other(tailbound_lab: Callable[..., Cluster]) -> None:
    lab = tailbound_lab(workers=2)
    read, write = os.pipe()
    mine = os.open(os.devnull, os.O_RDONLY)

    def main() -> int:
        there = sorted(os.listdir("/sys/class/net"))
        fds = {int(name) for name in os.listdir("/proc/self/fd")}
        said = [os.environ["RANK"], os.environ["EXTRA"], there, mine in fds, input()]
        os.write(write, json.dumps(said).encode())
        print("said")
        return 7

    process = lab.fork(1, main, {"EXTRA": "more"}, pass_fds=(write,))
    os.close(write)
    os.close(mine)
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    with open(read) as pipe:
        assert json.load(pipe) == ["1", "more", ["data0", "lo", "plain0"], False, "hello"]
    assert process.wait() == 7
    assert process.stdout.read() == b"said\n"
    waiting = lab.fork(0, lambda: signal.pause() or 0)
    assert waiting.poll() is None
    os.killpg(waiting.pid, signal.SIGTERM)
    assert waiting.wait() == -signal.SIGTERM
    for each in (process, waiting):
        for stream in (each.stdin, each.stdout, each.stderr):
            stream.close()


def test_a_flow_of_tcp_takes_what_the_link_has(tailbound_lab: Callable[..., Cluster]) -> None:
    lab = tailbound_lab(workers=2, rate=100_000_000, queue=64 << 10)
    with Flow(lab, 0, 1, congestion="reno", ecn=False) as flow:
        await_that(lambda: flow.delivered >= 500_000, "half a megabyte")
    counts = lab.queue_counts()
    assert counts.seen >= 500_000 // 1514
    with pytest.raises(OSError, match="No such file"):
        Flow(lab, 0, 1, congestion="nobody's", ecn=False)


def test_flows_that_know_of_marks_leave_each_other_room(tailbound_lab: Callable[..., Cluster]) -> None:
    """What waits in a finite queue waits in earnest: else the smallest window fills the link, and no mark slows it."""
    lab = tailbound_lab(workers=3, rate=100_000_000, queue=64 << 10, ecn=True)
    with Flow(lab, 1, 0, congestion="reno", ecn=True) as one, Flow(lab, 2, 0, congestion="reno", ecn=True) as other:
        await_that(lambda: one.delivered + other.delivered >= 4_000_000, "four megabytes")
        assert min(one.delivered, other.delivered) >= 1_000_000
    counts = lab.queue_counts()
    assert counts.marked > 0
    assert counts.overflowed < 10  # 26 to 64 where the queue was in the books only


def test_queues_are_counted_where_there_are_some(tailbound_lab: Callable[..., Cluster]) -> None:
    with pytest.raises(ConfigError, match=r"LabSpec\(queue"):
        tailbound_lab(workers=1).queue_counts()
