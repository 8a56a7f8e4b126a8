"""The split of an op: stamps on the transport thread, parts that add up, rows and the table."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from tailbound.collective.waiter import Waiter
from tailbound.transport import sockets
from tailbound.wire.check import check_packet
from tailbound_lab.bench.experiment import Phase, conditions
from tailbound_lab.bench.profile import PARTS, split, summarize
from tailbound_lab.bench.stopwatch import Stopwatch
from tailbound_lab.lab.spec import LabSpec

MS = 1_000_000
OP = {"wall": 100 * MS, "thread": 60 * MS, "codec": 20 * MS, "calls": 30 * MS, "own": 2 * MS, "others": 5 * MS,
      "waited": 15 * MS, "program": 12 * MS}  # fmt: skip


def in_ms(parts: dict[str, float]) -> list[float]:
    return [parts[name] / MS for name in PARTS]


@pytest.mark.parametrize(
    ("changes", "program", "expected"),
    [
        ({"waited": 90 * MS}, 10.0 * MS, [20, 20, 10, 12, 38, 0]),  # it waited before the op began, too
        ({"own": 45 * MS}, 10.0 * MS, [20, 20, 10, 55, 0, 0]),  # both threads worked at once
        ({}, 50.0 * MS, [20, 0, 30, 12, 15, 23]),  # programs ran outside of system calls as well
        ({"thread": 49 * MS}, 10.0 * MS, [20, 20, 10, 2, 15, 34]),
    ],
)
def test_no_part_is_below_nothing(changes: dict[str, int], program: float, expected: list[float]) -> None:
    assert in_ms(split(OP | changes, program)) == expected


def phase(*ranks: list[dict[str, Any]]) -> Phase:
    functions = {"a": [2 * MS, 8], "b": [4 * MS, 2]}
    times = {"tailbound": [[0.09] * len(ops) for ops in ranks]}
    return Phase(times, [{"stamps": ops, "functions": functions} for ops in ranks])


SETTINGS = conditions(LabSpec(2)) | {"datapath": "xdp"}


def test_rows_are_medians_and_say_what_these_are_short_of_the_op() -> None:
    other = OP | {"wall": 110 * MS, "program": 8 * MS}
    rows = summarize(4096, phase([OP, OP], [other, OP | {"program": 10 * MS}]), SETTINGS)
    assert [(row["rank"], row["workers"], row["bytes"], row["iters"]) for row in rows] == [
        (0, 2, 4096, 2),
        (1, 2, 4096, 2),
    ]
    first, second = rows
    assert [first[f"{name}_ms"] for name in PARTS] == pytest.approx([20, 19.5, 10.5, 12, 15, 23])
    assert (first["op_ms"], first["unstamped_ms"], first["other_threads_ms"]) == (100, 90, 5)
    assert (first["rest_ms"], second["op_ms"], second["idle_ms"]) == (pytest.approx(0), 105, 28)
    assert list(first["functions"].items()) == [("b", {"ms": 2, "calls": 1}), ("a", {"ms": 1, "calls": 4})]
    for row in rows:
        assert sum(row[f"{name}_ms"] for name in PARTS) + row["rest_ms"] == pytest.approx(row["op_ms"])


# -- stamps -------------------------------------------------------------------------------------------------------


class Clocks:
    """Processor time that passes when somebody says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        monkeypatch.setattr(time, "thread_time_ns", lambda: self.now)
        monkeypatch.setattr(time, "clock_gettime_ns", lambda clock: self.now)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def test_the_outermost_stamp_counts_and_other_threads_do_not(clocks: Clocks) -> None:
    watch = Stopwatch()

    def spend(ns: int) -> None:
        clocks.now += ns

    inner = watch.around(1, "inner", spend)

    def outer_function() -> None:
        spend(3)
        inner(4)

    outer = watch.around(0, "outer", outer_function)
    inner(100)  # nobody is watched yet
    watch.here()
    outer()
    inner(50)
    thread = threading.Thread(target=inner, args=(1000,))
    thread.start()
    thread.join()
    found = watch.read()
    assert (found.codec, found.calls) == (7, 50)
    assert watch.functions == {"outer": [7, 1], "inner": [50, 1]}


@pytest.fixture
def sock() -> Iterator[sockets.UdpSocket]:
    with sockets.UdpSocket() as made:
        made.bind(("127.0.0.1", 0))
        made.setblocking(False)
        yield made


def test_stamps_are_put_around_compiled_code_and_system_calls_and_taken_out(sock: sockets.UdpSocket) -> None:
    watch = Stopwatch()
    watch.here()
    data = np.zeros(64, np.uint8)
    expected = int(check_packet(data))
    places = (sockets.UdpSocket, Waiter, os, Dispatcher)
    before = [dict(vars(place)) for place in places]
    waiter = Waiter([sock.fileno()])
    with watch.installed():
        assert int(check_packet(data)) == expected
        assert sock.send_one(b"x" * 16, sock.getsockname()) == 0
        assert waiter.wait(10**10) == 1
        assert sock.recv(64) == b"x" * 16
    assert [dict(vars(place)) for place in places] == before
    assert {name: calls for name, (_, calls) in watch.functions.items()} == {
        "check_packet": 1, "send_one": 1, "wait": 1, "recv": 1,
    }  # fmt: skip
    assert int(check_packet(data)) == expected
    assert watch.functions["check_packet"][1] == 1
    found = watch.read()
    assert 0 < found.codec + found.calls <= found.thread
    assert found.begin <= found.end
