"""The slow rank and the output of many ranks, without a lab."""

from __future__ import annotations

import io
import os
import signal
import threading
from itertools import islice, repeat

import pytest
from rich.console import Console

from tailbound_lab.lab.output import LineSplitter, Streams
from tailbound_lab.lab.spec import Straggler
from tailbound_lab.lab.straggler import ENVIRONMENT, Freezer, run_times, step_delay


def test_only_the_named_rank_sleeps_and_only_if_it_is_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "2:40:step")
    assert [step_delay(rank) for rank in range(4)] == [0.0, 0.0, 0.04, 0.0]
    monkeypatch.setenv(ENVIRONMENT, "2:40:160")
    assert [step_delay(rank) for rank in range(4)] == [0.0] * 4
    monkeypatch.delenv(ENVIRONMENT)
    assert step_delay(2) == 0.0


def test_a_freezer_stops_and_continues_in_turn_and_leaves_the_group_running() -> None:
    sent: list[int] = []
    enough = threading.Event()

    def note(group: int, number: int) -> None:
        assert group == 77
        sent.append(number)
        if len(sent) >= 6:
            enough.set()

    freezer = Freezer(77, 0.0005, repeat(0.0005), signal_group=note)
    assert enough.wait(20)
    freezer.close()
    assert sent == [signal.SIGSTOP, signal.SIGCONT] * (len(sent) // 2)


def test_a_group_that_is_stopped_goes_on_when_the_freezer_is_closed() -> None:
    sent: list[int] = []
    stopped = threading.Event()

    def note(_: int, number: int) -> None:
        sent.append(number)
        stopped.set()

    freezer = Freezer(77, 1000.0, [0.0], signal_group=note)
    assert stopped.wait(20)
    freezer.close()
    assert sent == [signal.SIGSTOP, signal.SIGCONT]


def test_a_freezer_ends_with_its_group() -> None:
    gone = threading.Event()

    def missing(group: int, number: int) -> None:
        gone.set()
        raise ProcessLookupError

    freezer = Freezer(77, 1000.0, [0.0], signal_group=missing)
    assert gone.wait(20)
    freezer.close()


def test_running_times_follow_the_seed_and_the_mean() -> None:
    def times(seed: int, n: int) -> list[float]:
        return list(islice(run_times(Straggler(0, 40, 200), seed), n))

    assert times(1, 50) == times(1, 50) != times(2, 50)
    assert sum(times(3, 4000)) / 4000 == pytest.approx(0.160, rel=0.05)


def test_lines_come_whole_whatever_the_pieces() -> None:
    text = "first\nzweite Zeile: äöü\n10 %\r50 %\r100 %\r\nlast without end"
    for size in range(1, 9):
        data, splitter, lines = text.encode(), LineSplitter(), []
        for i in range(0, len(data), size):
            lines += splitter.feed(data[i : i + size])
        assert lines + splitter.finish() == ["first", "zweite Zeile: äöü", "100 %", "last without end"]
    broken = LineSplitter()
    assert broken.feed(b"\xff\xfe\n") == ["\N{REPLACEMENT CHARACTER}" * 2]
    assert broken.finish() == []


def test_every_line_has_its_rank_in_front() -> None:
    out, err = io.StringIO(), io.StringIO()
    streams = Streams(11, Console(file=out, width=20), Console(file=err, width=20))
    ends = []
    for rank, error in ((3, False), (10, True)):
        read, write = os.pipe()
        streams.add(rank, os.fdopen(read, "rb"), error=error)
        ends.append(write)
    long = "[bold]not markup[/bold] " + "x" * 60
    os.write(ends[0], f"{long}\nno end".encode())
    os.write(ends[1], b"oops\n")
    for end in ends:
        os.close(end)
    while streams.open:
        streams.pump(1.0)
    streams.close()
    assert out.getvalue() == f"[ 3] {long}\n[ 3] no end\n"
    assert err.getvalue() == "[10] oops\n"
