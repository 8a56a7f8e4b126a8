"""Deadlines learned from true arrival times (clock-5): S, transfer, D1, D2 and D_start.

A deadline is configured, learned and applied in three places:

- ``settings/table.py`` configures it: ``config_fields`` turns ``patience`` into the limits of ``transport/config.py``.
- This file learns it, within those limits, from what ``collective/timing.py`` hands over of ops that are over. Ops in
  flight are told (``Deadlines.tell``).
- ``host_lib/core/deadline.c`` says by that, and by what other ranks advertise, how long a half may last when its clock
  starts. ``halves.c`` ends a half, or moves its deadline on.

The rules are clock-3 to clock-6, clock-10, clock-11 and clock-26.

Pure state: durations go in, durations come out; no clock, no map. All times are nanoseconds. Start skew and transfer
are learned apart, since one is the ranks' doing and the other the network's, and every size of op has its transfer
times to itself: what a flow of two packets takes says nothing about the seconds per byte of one of four thousand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

from tailbound.transport.config import Config

#: Samples a window holds, and the share of them that a deadline covers (clock-4, clock-5).
WINDOW = 200
_COVER = 0.95
#: A tail that ``_MOST`` of all do not leave, and that is shorter than so many times the usual, is waited for.
_MOST, _NEAR = 0.97, 1.5
#: What is put on top of what was measured (clock-4).
_MARGIN = 1.25
#: Steps whose longest transfers make the usual one.
_USUAL_STEPS = 7
#: Ops of a size before its deadlines are trusted (clock-26), and before they are better than none: in between they are
#: so many times as long. An op whose deadline is needed there would otherwise take seconds.
WARM_UP_OPS, _FEW_OPS, _CAUTION = 20, 5, 4
#: q at least (clock-10): a part of the floor.
_QUIET = 10
_STEPS_KEPT = 5
#: Round trips of which the smallest is that of the path.
_RTTS = 32


@dataclass(slots=True)
class Sample:
    """What became of one op, judged two steps later by the stamps of all its rows, late ones included (clock-5).

    Attributes:
        flow_bytes: bytes of one rank's contributions to this one.
        first: from c to the first row of the last waited-for rank; None: no arrival. A suspect counts if it came
            within S_max: three ops make a suspect, but ten late samples a longer deadline, so that without this a rank
            that is late by less than it is worth would stay out for good.
        transfer: the longest time from first to last row of a rank, or what it would have taken (``timing.cut``); None:
            no last row seen.
        results: from the own seal to the last result row, or what that would have taken; None: none.
        step: its step; None: one of its own.
    """

    flow_bytes: int
    first: int | None = None
    transfer: int | None = None
    results: int | None = None
    step: int | None = None


def quantile(values: Collection[int], share: float = _COVER) -> int:
    """The smallest value that ``share`` of all do not exceed; 0 if there are none."""
    return sorted(values)[max(0, -(-int(share * 1000) * len(values) // 1000) - 1)] if values else 0


class Durations:
    """How long something takes: the usual length, and what ``_COVER`` of all do not exceed."""

    def __init__(self) -> None:
        self._all: deque[int] = deque(maxlen=WINDOW)
        self._steps: deque[int] = deque(maxlen=_USUAL_STEPS)  # the longest of each of the last steps
        self._step: int | None = None

    def __len__(self) -> int:
        return len(self._all)

    def add(self, step: int | None, value: int) -> None:
        """Takes a length of an op of ``step``."""
        self._all.append(value)
        if step is not None and step == self._step and self._steps:
            self._steps[-1] = max(self._steps[-1], value)
        else:
            self._steps.append(value)
        self._step = step

    def bound(self) -> int:
        """A length that nearly none exceeds, if that is not much more than the usual one; else the usual one.

        Where nearly all come within ``_NEAR`` times the usual length (busy hosts, for the most part) it costs little to
        wait for them. Where the tail is long (foreign bursts) it is not followed; rows that come then are waited for
        within the budget of clock-29.

        The usual one is the median over steps, of each the longest: what ops at one place of a step always take counts,
        and what hits a minority of steps does not. It never exceeds the bound, so that a change is followed at once.
        """
        if not self._steps:
            return 0
        usual = sorted(self._steps)[(len(self._steps) - 1) // 2]  # the lower median
        most = quantile(self._all, _MOST)
        return max(usual, most) if most <= _NEAR * usual else usual


class _Size:
    """What is known of ops of about one size."""

    def __init__(self) -> None:
        self.ops = 0
        self.bytes = 0  # the largest flow
        self.per_byte = Durations()  # ns per 2**20 bytes of a flow
        self.results = Durations()


class Deadlines:
    """One rank's own deadlines.

    Args:
        config: a deadline of 0 is learned, any other stays as it is.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._first: deque[int] = deque(maxlen=WINDOW)
        self._arrival = 0  # what nearly all of these do not exceed
        self._sizes: dict[int, _Size] = {}
        self._recent: deque[int] = deque(maxlen=WINDOW)
        #: bytes of the largest flow of late
        self.largest = 0
        self._step_times, self._computes = deque[int](maxlen=_STEPS_KEPT), deque[int](maxlen=_STEPS_KEPT)
        self._step, self._launched, self._finished = -1, 0, 0
        self._rtts: deque[int] = deque(maxlen=_RTTS)
        #: the own D1 that headers carry, ns: that of the largest ops of late, so that ranks compare like with like
        self.advertised = config.deadline_1 or config.stage_max
        #: counts what changes them
        self.changes = 0
        #: the own D1, and D2, for flows of so many bytes, ns (clock-4, clock-11, clock-26); both are told to every op,
        #: and change only when something has been learned. D1 is 0 where this rank owns no rows of such ops
        self.stage_one, self.stage_two = cache(self._stage_one), cache(self._stage_two)
        self._skew = 0  # as they took it; a step may change it
        #: q of clock-10, ns
        self.quiet = config.quiet or config.floor // _QUIET
        #: D_start of clock-3, ns: at least what is configured, and four times what a step computes
        self.start_max = config.start_max

    # -- learning -------------------------------------------------------------------------------------------------

    def learn(self, sample: Sample) -> None:
        """Takes an op that is settled; only while this rank is in step (clock-5)."""
        size = self._sizes.setdefault(sample.flow_bytes.bit_length(), _Size())
        size.ops += 1
        size.bytes = max(size.bytes, sample.flow_bytes)
        if sample.first is not None:
            self._first.append(sample.first)
            self._arrival = quantile(self._first)
        if sample.transfer is not None:
            size.per_byte.add(sample.step, (sample.transfer << 20) // max(1, sample.flow_bytes))
        if sample.results is not None:
            size.results.add(sample.step, sample.results)
        self._recent.append(sample.flow_bytes)
        self.largest = max(self._recent)
        self._learned()

    def step(self, step: int, launched: int, finished: int, *, last: bool) -> None:
        """An op of ``step`` is over: what a step takes, and how much of it is computing (clock-3, clock-4).

        Args:
            step: its number.
            launched, finished: when its own launch came and when it ended.
            last: whether the step ends with it.
        """
        if step == self._step and not last:  # it says nothing new
            return
        if step != self._step:
            if self._launched and step == self._step + 1:
                self._step_times.append(max(0, launched - self._launched))
            else:
                self._finished = 0
            self._step, self._launched = step, launched
        if last:
            if self._finished:
                self._computes.append(max(0, launched - self._finished))
            self._finished = finished
        if self.skew != self._skew:
            self._learned()
        else:
            self._learn_start()

    def round_trip(self, rtt: int) -> None:
        """Takes the largest of the present round trips to live peers, in ns.

        q is two of the smallest one: a loaded one contains the sender's own bursts, and rows that the finished mark has
        overtaken do not come behind those.
        """
        self._rtts.append(rtt)
        self.quiet = self._config.quiet or max(self._config.floor // _QUIET, 2 * min(self._rtts))

    def _learned(self) -> None:
        """What had been worked out from what was known until now is forgotten."""
        self.changes += 1
        self.stage_one.cache_clear()
        self.stage_two.cache_clear()
        self._skew = self.skew
        self._learn_start()
        self.advertised = self.stage_one(self.largest)

    def _learn_start(self) -> None:
        self.start_max = max(self._config.start_max, 4 * quantile(self._computes, 0.5))

    # -- asking ---------------------------------------------------------------------------------------------------

    def _near(self, flow_bytes: int) -> _Size | None:
        """What is known of flows of about this size; of half or twice that as long as these are new.

        Another owner map changes the size of every flow, and nothing else: what was learned must not be lost by it.
        """
        own = self._sizes.get(flow_bytes.bit_length())
        if own is None or own.ops < WARM_UP_OPS:
            for bits in (flow_bytes.bit_length() - 1, flow_bytes.bit_length() + 1):
                size = self._sizes.get(bits)
                if size is not None and size.ops >= WARM_UP_OPS:
                    return size
        return own

    def heard_of(self, flow_bytes: int) -> bool:
        """Whether anything is known of ops with flows of this size: ranks begin the first ones apart."""
        return self._near(flow_bytes) is not None

    def warm(self, flow_bytes: int) -> bool:
        """Whether enough is known of ops with flows of this size (clock-26)."""
        size = self._near(flow_bytes)
        return size is not None and size.ops >= WARM_UP_OPS and len(size.per_byte) > 0 and bool(self._first)

    @property
    def skew_max(self) -> int:
        """S_max of clock-4: waiting longer than this would cost more than the last rank's share is worth."""
        if not self._step_times:
            return self._config.stage_max
        return max(self._config.floor, quantile(self._step_times, 0.5) // max(1, self._config.ranks - 1))

    @property
    def skew(self) -> int:
        """S of clock-4: how long to wait for the first row of the last rank."""
        return min(int(self._arrival * _MARGIN), self.skew_max)

    def transfer(self, flow_bytes: int) -> int:
        """bytes x tau of clock-4."""
        size = self._near(flow_bytes)
        if size is None:
            return 0
        return int(size.per_byte.bound() * flow_bytes * _MARGIN) >> 20

    def _stage_one(self, flow_bytes: int) -> int:
        if self._config.deadline_1:
            return self._config.deadline_1
        size = self._known(flow_bytes)
        if size is None:
            return self._config.stage_max
        if not len(size.per_byte):
            return 0
        return self._careful(size, self.skew + self.transfer(flow_bytes))

    def _stage_two(self, flow_bytes: int) -> int:
        if self._config.deadline_2:
            return self._config.deadline_2
        size = self._known(flow_bytes)
        if size is None or not len(size.results):
            return self._config.stage_max
        larger = max(1.0, flow_bytes / size.bytes)
        return self._careful(size, int(size.results.bound() * larger * _MARGIN))

    def _known(self, flow_bytes: int) -> _Size | None:
        """Ops of this size, if there were a few."""
        size = self._near(flow_bytes)
        return None if size is None or size.ops < _FEW_OPS else size

    def _careful(self, size: _Size, length: int) -> int:
        """A deadline of ``length`` within its bounds, or a longer one as long as the size is new."""
        length = max(self._config.floor, length)
        if size.ops < WARM_UP_OPS:
            length *= _CAUTION
        return min(length, self._config.stage_max)

    def tell(self, op: Any, flow_bytes: int) -> None:
        """Writes into a ``tb_own_op`` what the library says by how long its halves may last (``core/deadline.c``)."""
        op.stage_one, op.usual = self.stage_one(flow_bytes), self.stage_two(flow_bytes)
        op.known = self.warm(flow_bytes)
        op.worth = min(2 * op.usual, self._config.stage_max)  # later, receivers have given up (clock-11, clock-17)
