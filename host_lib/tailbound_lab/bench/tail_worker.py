"""One rank of ``tailbound bench tail``: does phases as it is told, and reports every iteration as soon as it is over.

A phase is a number of rounds of Tailbound, of Gloo, or of both in turn. *Meeting* rounds begin at one moment for all
ranks (``start``); *paced* ones begin by the clock, every ``period`` seconds, whether the others are there or not, as
steps do that computing paces: so a rank that stands still is waited for by those only who need it.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from tailbound.collective.communicator import Communicator
from tailbound_lab.bench.channel import Channel, serve
from tailbound_lab.bench.join import joined
from tailbound_lab.bench.meter import Meter
from tailbound_lab.bench.start import StartLine
from tailbound_lab.bench.worker import OURS, THEIRS, Contest, totals

_REPORT_SECONDS = 0.1
#: Rounds whose results are compared with the exact mean: every so many, since comparing takes as long as averaging.
_COMPARED_EVERY = 10


def order_of(names: list[str], round_number: int) -> list[str]:
    """Who is measured in a round, in which order: it alternates."""
    return names if round_number % 2 == 0 else names[::-1]


class _Diary:
    """Collects (name, seconds) and reports them in small batches."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._entries: list[tuple[str, float]] = []
        self._told = time.monotonic()

    def add(self, name: str, seconds: float) -> None:
        """One iteration; goes out with those of the last tenth of a second."""
        self._entries.append((name, seconds))
        if time.monotonic() - self._told > _REPORT_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Reports what has not been reported."""
        if self._entries:
            self._channel.report("times", times=self._entries)
            self._entries = []
        self._told = time.monotonic()


def deadlines_ms(ours: Communicator) -> tuple[float, float]:
    """D1 and D2 of this rank for the largest ops of late, in milliseconds (clock-4 and clock-11)."""
    learned = ours.job.deadlines
    return learned.stage_one(learned.largest) / 1e6, learned.stage_two(learned.largest) / 1e6


class _Worker:
    """What a rank keeps from phase to phase."""

    def __init__(self, job: dict[str, Any], ours: Communicator, line: StartLine, channel: Channel) -> None:
        self._ours, self._line, self._channel = ours, line, channel
        self._contest = Contest(job["size"], ours, line, Meter(kernel=ours.config.rank == 0))

    def phase(self, what: dict[str, Any]) -> None:
        """Does one phase and reports ``phase`` when it is over."""
        ours = self._ours
        ours.drain()
        before = totals(ours)
        diary = _Diary(self._channel)
        self._contest.forget()
        if what["period"]:
            self._paced(what, diary)
        else:
            self._meeting(what, diary)
        diary.flush()
        ours.drain()
        self._contest.meter.turn()
        after = totals(ours)
        self._channel.report(
            "phase",
            nmse=self._contest.errors[OURS],
            spent=self._contest.meter.report(),
            deadlines_ms=deadlines_ms(ours),
            **{name: after[name] - before[name] for name in before},
        )

    def _meeting(self, what: dict[str, Any], diary: _Diary) -> None:
        end = time.monotonic() + what["seconds"]
        number = 0
        while True:
            last = number >= what["rounds"] or time.monotonic() > end
            self._line.wait(last=last)
            if self._line.over:
                return
            for name in order_of(what["names"], number):
                compare = number % _COMPARED_EVERY == 0 and what["compare"]
                if name == THEIRS:  # it may not come back, and what was before it must be known
                    diary.flush()
                diary.add(name, self._contest.round(name, keep=False, compare=compare))
            number += 1

    def _paced(self, what: dict[str, Any], diary: _Diary) -> None:
        (name,) = what["names"]
        begin = self._line.wait(meanwhile=lambda: self._contest.meter.turn(name)) / 1e9
        self._channel.report("begun")
        for number in range(what["rounds"]):
            wait = begin + number * what["period"] - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            diary.add(name, self._contest.alone(name))


def work(job: dict[str, Any], channel: Channel) -> None:
    """Everything this rank does."""
    with joined(job) as (ours, line):
        worker = _Worker(job, ours, line, channel)
        channel.report("ready", datapath=ours.datapath)
        while order := channel.order():
            if order == "end":
                break
            worker.phase(json.loads(order))


if __name__ == "__main__":
    sys.exit(serve(work))
