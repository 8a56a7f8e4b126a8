"""A coarse model of what the exact simulation is too slow for: thousands of ranks, without the engine.

Packets, links, ports and foreign bursts are as in ``ports``; the engine is not there. Every rank sends its packets to
the others in turn, beginning with the next one, waits until all of theirs are in, and sends results in the same way.
What is dropped is asked for in a silence, and comes then. Deadlines are learned and end halves much as the engine's do
(clock-3, clock-4, clock-11, clock-29), and what comes later is lost. ``docs/simulate.md`` has its figures beside the
exact ones.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.shape import shape_for
from tailbound.transport.config import FLOOR
from tailbound.transport.overtime import FIRST, MOST, SHARE
from tailbound.wire.jit import cached, njit
from tailbound.wire.schema import HEADER_BYTES, MAX_RANKS
from tailbound_lab.lab.spec import Background
from tailbound_lab.lab.traffic import PACKET_BYTES, Sender
from tailbound_lab.simulate.fabric import MS, US, S
from tailbound_lab.simulate.layouts import Arrangement
from tailbound_lab.simulate.ports import HEADERS, Switching
from tailbound_lab.simulate.steps import APART, WIDTH, Step

#: Of the floor of deadlines, after which what is dropped from a short flow has come: two silences before its mark and
#: its rows are asked for (``transport.tail_probe``), and q.
_SILENCE = 0.9
#: Margins of a deadline and of a whole op, steps that make the usual one (``transport.deadline``); of the floor, what
#: may be waited past deadlines to begin with and at most, and the share of the time (``transport.overtime``).
_MARGIN, _MARGIN_WHOLE, _USUAL = 1.25, 1.15, 7
_FIRST, _MOST, _SHARE = FIRST / FLOOR, MOST / FLOOR, SHARE
#: What a turn of the engine takes from what came to what leaves, ns.
_TURN = 30 * US
_READY = HEADER_BYTES + MAX_RANKS // 8 + HEADERS


@cached
@njit(nogil=True, cache=True)
def _half(  # type: ignore[no-untyped-def]
    starts, packets, each, ready, by_sender, rate, buffer, latency, silence, begins, ends, foreign, share,
    clock, length, done, end, own
):  # fmt: skip
    """One half of an op: everybody sends to everybody; returns packets sent, dropped, and rows that came too late.

    Args:
        starts: f64[n], when each rank begins to send, ns.
        packets: i64[n], rows that a rank owns; who owns none is sent, or sends, one READY.
        each, ready: bytes of a packet with a row, and of a READY.
        by_sender: second half: a rank sends its own rows to all.
        rate: bytes per ns.
        buffer: bytes before a link.
        latency, silence: ns; what is dropped comes so long after the rest.
        begins, ends: f64[n], of the foreign burst towards each rank.
        foreign, share: bytes of a chunk of it, and of the rate how much there is.
        clock: f64[n], when the clock of each has started; written in the first half: when a majority was there.
        length: f64[n], how long after that a half lasts at most, ns.
        done, end: f64[n], written: when all that is for it has come, and when it goes on.
        own: clocks start with the own launch, and not with a majority.
    """
    n = len(starts)
    sent, dropped, late = 0, 0, 0
    size, count = np.empty(n), np.empty(n, np.int64)
    for i in range(n):
        size[i] = packets[i] * each if packets[i] else ready
        count[i] = max(packets[i], 1)
    before = np.zeros(2 * n + 1)
    for i in range(2 * n):
        before[i + 1] = before[i] + size[i % n]
    most = int(count.max()) * n
    times, sizes, came = np.empty(most), np.empty(most), np.empty(most)
    whose, first = np.empty(most, np.int64), np.empty(n)
    for r in range(n):
        m = 0
        first[:] = np.inf
        for s in range(n):
            if s == r:
                continue
            turn = (r - s) % n
            owner = s if by_sender else r
            ahead = (turn - 1) * size[s] if by_sender else before[s + turn] - before[s + 1]
            one = each if packets[owner] else ready
            for k in range(count[owner]):
                times[m] = starts[s] + (ahead + (k + 1) * one) / rate + latency
                sizes[m], whose[m] = one, s
                m += 1
        order = np.argsort(times[:m])
        free, last, lost = 0.0, starts[r], False
        chunk = begins[r]
        for i in order:
            now = times[i]
            while chunk < ends[r] and chunk <= now:
                if (free - chunk) * rate + foreign <= buffer or free < chunk:
                    free = max(free, chunk) + foreign / rate
                chunk += foreign / (rate * share)
            sent += 1
            if free > now and (free - now) * rate + sizes[i] > buffer:
                dropped += 1
                lost = True
                came[i] = np.inf
                continue
            free = max(free, now) + sizes[i] / rate
            came[i] = free
            first[whose[i]] = min(first[whose[i]], free)
            last = max(last, free)
        done[r] = last + (silence if lost else 0.0)
        if not by_sender:
            clock[r] = starts[r] if own else max(starts[r], np.sort(first)[n // 2 - 1])
        end[r] = min(done[r], max(starts[r], clock[r] + length[r]))
        for i in range(m):
            rows = sizes[i] != ready
            if rows and (came[i] if came[i] < np.inf else done[r]) > end[r]:
                late += 1
    return sent, dropped, late


class _Clocks:
    """Deadlines of one job: what its halves took of late, and what each rank may wait past them.

    Args:
        ranks: how many.
        floor: see ``transport.config.Config``.
        cut: see ``Flows``.
    """

    def __init__(self, ranks: int, floor: int, cut: float) -> None:
        self._floor, self._cut = floor, cut
        self.saved = np.full(ranks, 0.0 if cut else _FIRST * floor)
        self._took: deque[NDArray[np.float64]] = deque(maxlen=_USUAL)

    def learn(self, first: NDArray[np.float64], second: NDArray[np.float64], whole: NDArray[np.float64]) -> None:
        """What an op took each rank without any deadline, ns: from the clock, from the own seal, and in all."""
        self._took.append(np.array([first, second, whole]))

    def lengths(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """How long after its clock each owner seals, and each receiver gives up, ns."""
        if len(self._took) < _USUAL:
            return (np.full(len(self.saved), np.inf),) * 2
        first, second, whole = np.median(np.array(self._took), axis=0)
        if self._cut:
            return self._cut * first, self._cut * whole
        floor, own = self._floor, np.maximum(self._floor, _MARGIN * first)
        seals = np.full(len(own), float(np.median(own)))
        last = own.max() + max(floor, own.max() / 10)
        second = np.maximum(floor, _MARGIN * second)
        return seals, np.maximum(last + floor, np.minimum(last + second, _MARGIN_WHOLE * whole))

    def charge(self, past: NDArray[np.float64], passed: float) -> None:
        """An op of ``passed`` ns has waited so long past its deadlines."""
        if self._cut:
            return
        self.saved = np.minimum(_MOST * self._floor, self.saved - np.maximum(0.0, past) + _SHARE * passed)


@dataclass
class Flows:
    """Steps of many ranks by the coarse model.

    Args:
        arrangement: who is in which jobs, one rank a host.
        switching: of the network; without racks and losses.
        seed: of everything.
        floor: see ``transport.config.Config``.
        cut: where it is not 0, halves end at so many times what they usually take from the own launch, whatever may
            come: what no deadline of the engine does.
    """

    arrangement: Arrangement
    switching: Switching
    seed: int
    floor: int = FLOOR
    cut: float = 0.0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self._sent = self._messages = self._dropped = self._expected = self._late = 0
        self._clocks: dict[int, _Clocks] = {}
        self._took: deque[float] = deque(maxlen=_USUAL)
        self._bytes = 0.0

    def begin_bursts(self, background: Background) -> None:
        """Foreign bursts towards every host from now on."""
        self.switching = replace(self.switching, background=background)

    @property
    def background(self) -> Background | None:
        """Foreign bursts that there are."""
        return self.switching.background

    largest_backlog = 0.0  #: nobody looks

    def close(self) -> None:
        """Nothing is open."""

    def step(self) -> Step:
        """All ranks reduce one bucket; lost for good is what comes after a deadline.

        A message is what a rank has for another one in one half of an op; what is asked for again is not counted.
        """
        ranks, random = len(self.arrangement.parts), self._random
        begun = random.uniform(0, APART, ranks)
        now = begun.copy()
        begins, ends = self.bursts(float(np.median(self._took)) if self._took else 0.0)
        sent, messages, dropped, length = self._sent, self._messages, self._dropped, self._bytes
        expected, lost = self._expected, self._late
        for phase in range(len(self.arrangement.parts[0])):
            after = now.copy()
            for job in dict.fromkeys(parts[phase].job for parts in self.arrangement.parts):
                places = np.array(self.arrangement.places[job])
                part = self.arrangement.parts[places[0]][phase]
                after[places] = self._op(part.job, now[places], part.entries, begins[places], ends[places])
            now = after
        dropped = self._dropped - dropped
        step = Step((now - begun).astype(np.int64).tolist(), packets=self._sent - sent)
        self._took.append(step.slowest)
        step.messages = self._messages - messages
        step.bytes = int(self._bytes - length)
        step.dropped = {"port": dropped} if dropped else {}
        step.expected = self._expected - expected
        step.delivered = step.expected - (self._late - lost)
        return step

    def bursts(self, usual: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Begin and end of the foreign burst towards each rank, ns, f64[ranks]; inf and -inf where there is none.

        A burst begins at any time from which it can reach into a step: within its own length before, or in the
        ``usual`` time of a step, or for as long as it may make the step itself. There is one a rank and step at most.
        """
        ranks, random = len(self.arrangement.parts), self._random
        begins, ends = np.full(ranks, np.inf), np.full(ranks, -np.inf)
        if (background := self.switching.background) is not None:
            burst, pause = background.on_ms * MS, background.off_ms * MS
            last = max(burst, usual)
            hit = random.random(ranks) < (burst + last) / (burst + pause)
            begins[hit] = random.uniform(-burst, last, int(hit.sum()))
            ends[hit] = begins[hit] + burst * random.uniform(0.8, 1.2, int(hit.sum()))
        return begins, ends

    def foreign(self) -> tuple[float, float]:
        """Bytes of a foreign chunk, as ``lab.traffic`` sends it, and of the link's rate how much there is."""
        background = self.switching.background
        if background is None:
            return 0.0, 1.0
        return Sender(background, self.seed, 1).packets * float(PACKET_BYTES + HEADERS), (
            background.rate / self.switching.rate
        )

    def _op(
        self,
        job: int,
        now: NDArray[np.float64],
        entries: int,
        begins: NDArray[np.float64],
        ends: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        shape, ranks = shape_for(entries, WIDTH), len(now)
        packets = np.full(ranks, shape.rows // ranks)
        packets[: shape.rows % ranks] += 1
        switching, clocks = self.switching, self._clocks.setdefault(job, _Clocks(ranks, self.floor, self.cut))
        each, rate = float(shape.codes + HEADER_BYTES + HEADERS), switching.rate / 8 / S
        sizes = np.where(packets > 0, packets * each, _READY)
        first, second = clocks.lengths()
        begun, clock, sealed, past = now, np.zeros(ranks), now, np.zeros(ranks)
        took = []
        for by_sender, length in ((False, first), (True, second)):
            self._bytes += (ranks - 1) * float(sizes.sum())
            self._messages += (ranks - 1) * ranks
            self._expected += (ranks - 1) * shape.rows
            done, end = np.zeros(ranks), np.zeros(ranks)
            limit = length + np.maximum(0.0, clocks.saved - past)
            sent, dropped, late = _half(
                now, packets, each, float(_READY), by_sender, rate, float(switching.buffer), float(switching.latency),
                _SILENCE * self.floor, begins, ends, *self.foreign(), clock, limit, done, end, self.cut > 0,
            )  # fmt: skip
            self._sent, self._dropped, self._late = self._sent + sent, self._dropped + dropped, self._late + late
            past = np.maximum(past, end - clock - length)
            took.append(done - (sealed if by_sender else clock))
            sealed = end
            now = end + _TURN
        clocks.learn(took[0], took[1], done - clock)
        clocks.charge(past, float((now - begun).max()))
        return now
