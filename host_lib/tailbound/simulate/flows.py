"""A coarse model of what the exact simulation is too slow for: thousands of ranks, without the engine.

Packets, links, ports and foreign bursts are as in ``ports``; the engine is not there. Every rank sends its packets to
the others in turn, beginning with the next one, waits until all of theirs are in, and sends results in the same way.
What is dropped is asked for once nothing has come for ``_SILENCE``, as the engine asks a peer of which nothing came,
and comes then; no deadline cuts anything off. ``docs/simulate.md`` has its figures beside the exact ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.shape import shape_for
from tailbound.lab.spec import Background
from tailbound.simulate.fabric import MS, US, S
from tailbound.simulate.layouts import Arrangement
from tailbound.simulate.ports import HEADERS, Switching
from tailbound.simulate.steps import APART, WIDTH, Step
from tailbound.wire.jit import cached, njit
from tailbound.wire.schema import HEADER_BYTES, MAX_RANKS

#: After which a peer of which nothing has come is asked (``transport.tail_probe``).
_SILENCE = 20 * MS
#: What a turn of the engine takes from what came to what leaves, ns.
_TURN = 30 * US
#: A foreign chunk, bytes, and of the link's rate how much there is (``lab.traffic``, ``run.bursts``).
_CHUNK, _FOREIGN = 44 * 1442.0, 0.9
_READY = HEADER_BYTES + MAX_RANKS // 8 + HEADERS


@cached
@njit(nogil=True, cache=True)
def _half(starts, packets, each, ready, by_sender, rate, buffer, latency, begins, ends, done):  # type: ignore[no-untyped-def]
    """One half of an op: everybody sends to everybody; returns packets sent and dropped.

    Args:
        starts: f64[n], when each rank begins to send, ns.
        packets: i64[n], rows that a rank owns; who owns none is sent, or sends, one READY.
        each, ready: bytes of a packet with a row, and of a READY.
        by_sender: second half: a rank sends its own rows to all.
        rate: bytes per ns.
        buffer: bytes before a link.
        latency: ns.
        begins, ends: f64[n], of the foreign burst towards each rank.
        done: f64[n], written: when all that is for it has come.
    """
    n = len(starts)
    sent, dropped = 0, 0
    size, count = np.empty(n), np.empty(n, np.int64)
    for i in range(n):
        size[i] = packets[i] * each if packets[i] else ready
        count[i] = max(packets[i], 1)
    before = np.zeros(2 * n + 1)
    for i in range(2 * n):
        before[i + 1] = before[i] + size[i % n]
    most = int(count.max()) * n
    times, sizes = np.empty(most), np.empty(most)
    for r in range(n):
        m = 0
        for s in range(n):
            if s == r:
                continue
            turn = (r - s) % n
            owner = s if by_sender else r
            ahead = (turn - 1) * size[s] if by_sender else before[s + turn] - before[s + 1]
            one = each if packets[owner] else ready
            for k in range(count[owner]):
                times[m] = starts[s] + (ahead + (k + 1) * one) / rate + latency
                sizes[m] = one
                m += 1
        order = np.argsort(times[:m])
        free, last, lost = 0.0, starts[r], False
        chunk = begins[r]
        for i in order:
            now = times[i]
            while chunk < ends[r] and chunk <= now:
                if (free - chunk) * rate + _CHUNK <= buffer or free < chunk:
                    free = max(free, chunk) + _CHUNK / rate
                chunk += _CHUNK / (rate * _FOREIGN)
            sent += 1
            if free > now and (free - now) * rate + sizes[i] > buffer:
                dropped += 1
                lost = True
                continue
            free = max(free, now) + sizes[i] / rate
            last = max(last, free)
        done[r] = last + (_SILENCE if lost else 0.0)
    return sent, dropped


@dataclass
class Flows:
    """Steps of many ranks by the coarse model.

    Args:
        arrangement: who is in which jobs, one rank a host.
        switching: of the network; without racks and losses.
        seed: of everything.
    """

    arrangement: Arrangement
    switching: Switching
    seed: int

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self._sent = self._messages = self._dropped = 0
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
        """All ranks reduce one bucket; nothing is lost for good, since what is dropped comes once it is asked for.

        A message is what a rank has for another one in one half of an op; what is asked for again is not counted.
        """
        ranks, random = len(self.arrangement.parts), self._random
        begun = random.uniform(0, APART, ranks)
        now = begun.copy()
        begins, ends = np.full(ranks, np.inf), np.full(ranks, -np.inf)
        if (background := self.switching.background) is not None:
            burst, pause = background.on_ms * MS, background.off_ms * MS
            hit = random.random(ranks) < 2 * burst / (burst + pause)
            begins[hit] = random.uniform(-burst, burst, int(hit.sum()))
            ends[hit] = begins[hit] + burst * random.uniform(0.8, 1.2, int(hit.sum()))
        sent, messages, dropped, length = self._sent, self._messages, self._dropped, self._bytes
        for phase in range(len(self.arrangement.parts[0])):
            after = now.copy()
            for job in dict.fromkeys(parts[phase].job for parts in self.arrangement.parts):
                places = np.array(self.arrangement.places[job])
                part = self.arrangement.parts[places[0]][phase]
                after[places] = self._op(now[places], part.entries, begins[places], ends[places])
            now = after
        dropped = self._dropped - dropped
        step = Step((now - begun).astype(np.int64).tolist(), packets=self._sent - sent)
        step.messages = self._messages - messages
        step.bytes = int(self._bytes - length)
        step.dropped = {"port": dropped} if dropped else {}
        return step

    def _op(
        self, now: NDArray[np.float64], entries: int, begins: NDArray[np.float64], ends: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        shape, ranks = shape_for(entries, WIDTH), len(now)
        packets = np.full(ranks, shape.rows // ranks)
        packets[: shape.rows % ranks] += 1
        switching = self.switching
        each, rate = float(shape.codes + HEADER_BYTES + HEADERS), switching.rate / 8 / S
        sizes = np.where(packets > 0, packets * each, _READY)
        for by_sender in (False, True):
            self._bytes += (ranks - 1) * float(sizes.sum())
            self._messages += (ranks - 1) * ranks
            done = np.zeros(ranks)
            sent, dropped = _half(
                now, packets, each, float(_READY), by_sender, rate, float(switching.buffer), float(switching.latency),
                begins, ends, done,
            )  # fmt: skip
            self._sent, self._dropped = self._sent + sent, self._dropped + dropped
            now = done + _TURN
        return now
