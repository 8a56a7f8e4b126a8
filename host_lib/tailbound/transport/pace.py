"""How fast to send to each rank: TIMELY (SIGCOMM'15, section 4) on round trips that the peers' kernels reflect.

Pure state with the time passed in. A destination starts without a limit, so that nothing is slower where nothing is
wrong, and gets one when round trips say that a queue stands. Departures from the paper, each because of what is
measured here:

- The first limit is what drained: bytes on the way divided by the round trip. An unlimited sender has no rate to lower.
- One round trip is in flight at a time, so a decrease is never repeated for packets that were queued before it.
- The addend is a part of the rate (5 %) and a little, not 10 Mb/s, so that a link that comes back is used within tens
  of ops; and there is a pause between two raises, or short round trips would make it an explosion.
- Above T_high nothing is lowered while round trips fall: the queue drains already.
- Between the bounds a fall of round trips gives back what an equal rise has taken, so that a queue that others keep
  standing does not lower a rate for ever.
- The gradient is taken relative to ``t_low``, not to the smallest round trip, which on one host is scheduling noise.
- One long round trip after a short one changes nothing, and the first limit takes three: hosts that share cores make
  such without any queue.

Loss does not lower a rate (clock-24).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

#: No limit.
UNLIMITED = 0.0
_SECOND = 1_000_000_000
#: A queue whose round trips fall by this part of ``t_low`` is being drained already: what was done is enough.
_FALLING = 0.1
#: Rates that differ by more than this are those of different links, not of one queue.
_UNEVEN = 2.0


@dataclass(frozen=True)
class TimelyConfig:
    """Settings of the control of a rate; times in ns, rates in bytes per second.

    Attributes:
        t_low: round trips below this say that there is no queue (the paper's T_low).
        t_high: round trips above this are never accepted (T_high).
        beta: multiplicative decrease.
        alpha: weight of a new difference of round trips in the gradient.
        addend, step: part of the rate, and bytes per second, that are added; five times as much after ``hai`` good
            ones running (HAI).
        gentle: multiplicative decrease by the gradient, between the bounds.
        pause: ns between two raises.
        sure: long round trips running that make a first limit (two make a decrease).
        first: no first limit is lower: what little was sent says nothing about the path.
        floor: no rate is lower.
        free: a rate above this is no limit any more.
        quantum: ns of sending that may leave at once.
    """

    t_low: int = 2_000_000
    t_high: int = 8_000_000
    beta: float = 0.8
    alpha: float = 0.875
    addend: float = 0.05
    step: float = 2.5e5
    gentle: float = 0.2
    pause: int = 4_000_000
    hai: int = 3
    sure: int = 3
    first: float = 1.5e8
    floor: float = 1e6
    free: float = 2.5e9
    quantum: int = 500_000


class Timely:
    """Rate towards one rank.

    Attributes:
        rate: bytes per second; 0: unlimited.
        rtt: the last round trip in ns; 0: none yet.
    """

    def __init__(self, limits: TimelyConfig) -> None:
        self._limits = limits
        self.rate = UNLIMITED
        self.rtt = 0
        self._difference = 0.0
        self._good = 0
        self._long = 0
        self._raised = 0

    def observe(self, rtt: int, sent: int, now: int) -> None:
        """Takes one round trip in ns; ``sent``: bytes that left for this rank since the probe before this one."""
        limits, before = self._limits, self.rtt
        self.rtt = rtt
        change = rtt - before if before else 0
        self._difference += limits.alpha * (change - self._difference)
        self._long = self._long + 1 if rtt > limits.t_high else 0
        if self.rate == UNLIMITED:
            if self._long >= limits.sure:
                self._set(min(limits.free, max(limits.first, sent * _SECOND / rtt)))
                self._raised, self._good = now, 0
            return
        gradient = self._difference / limits.t_low
        if rtt < limits.t_low:
            self._raise(now)
        elif rtt > limits.t_high:
            self._good = 0
            if self._long >= 2 and gradient > -_FALLING:
                self._set(self.rate * (1 - limits.beta * (1 - limits.t_high / rtt)))
        elif gradient > 0:
            self._good = 0
            self._set(self.rate * (1 - limits.gentle * min(1.0, gradient)))
        elif rtt < 2 * limits.t_low:
            self._good = 0
            self._raise(now)
        elif before <= limits.t_high:
            self._set(self.rate / (1 - limits.gentle * min(1.0, -gradient)))

    def _raise(self, now: int) -> None:
        limits = self._limits
        if now - self._raised < limits.pause:
            return
        self._raised = now
        self._good += 1
        times = 5 if self._good >= limits.hai else 1
        self._set(self.rate + times * (limits.addend * self.rate + limits.step))

    def _set(self, rate: float) -> None:
        self.rate = UNLIMITED if rate > self._limits.free else max(self._limits.floor, rate)


class Pacer:
    """Rates of all destinations, and when each may send again (a token bucket of one ``quantum``).

    Args:
        ranks: destinations.
        limits: settings.
        gap: ns from one burst to the next, whomever they are for; 0: none. For receivers with room for few bursts.
    """

    def __init__(self, ranks: Iterable[int], limits: TimelyConfig | None = None, gap: int = 0) -> None:
        self.limits = limits or TimelyConfig()
        self._gap = gap
        #: when the next burst may leave, as far as gaps go, ns
        self.opens = 0
        self.paths = {rank: Timely(self.limits) for rank in ranks}
        self._next = dict.fromkeys(self.paths, 0)
        #: ranks with a limit; empty as a rule
        self.limited: set[int] = set()

    def observe(self, rank: int, rtt: int, sent: int, now: int) -> None:
        """A round trip to ``rank`` of ``rtt`` ns; ``sent`` as in ``Timely.observe``."""
        path = self.paths[rank]
        path.observe(rtt, sent, now)
        if path.rate == UNLIMITED:
            self.limited.discard(rank)
        else:
            self.limited.add(rank)

    def rate(self, rank: int) -> float:
        """Bytes per second towards ``rank``; 0: unlimited."""
        return self.paths[rank].rate

    def burst(self, rank: int, stride: int, most: int) -> int:
        """Packets of ``stride`` bytes in a burst: at most ``most``, and at most a quantum's worth for a slow rank."""
        rate = self.paths[rank].rate
        if rate == UNLIMITED:
            return most
        return max(1, min(most, int(rate * self.limits.quantum / _SECOND / stride)))

    def grant(self, rank: int, size: int, now: int) -> tuple[int, int]:
        """How many bursts of ``size`` bytes may leave now, and if none, when the next one may."""
        rate = self.paths[rank].rate
        if rate == UNLIMITED:
            return 1 << 30, 0
        begin = max(self._next[rank], now - self.limits.quantum)
        if begin > now:
            return 0, begin
        return max(1, int((now - begin) * rate / _SECOND / size)), 0

    def slowest(self, ranks: Collection[int], stride: int, most: int, now: int) -> tuple[int, int, int]:
        """Bursts to all of ``ranks`` at once: packets of one, how many may leave now, and if none, when the next may.

        All of it is that of the slowest rank. Arguments: ``burst`` and ``grant``.
        """
        size = min((self.burst(rank, stride, most) for rank in ranks), default=most)
        grants = [self.grant(rank, size * stride, now) for rank in ranks] or [(1 << 30, 0)]
        return size, min(allowed for allowed, _ in grants), max(again for _, again in grants)

    def even(self, ranks: Collection[int]) -> bool:
        """Whether nobody among ``ranks`` is more than ``_UNEVEN`` times slower than another."""
        if self.limited.isdisjoint(ranks):
            return True
        rates = [self.paths[rank].rate or float("inf") for rank in ranks]
        return max(rates) <= _UNEVEN * min(rates)

    def bursts(self, most: int, now: int) -> int:
        """Bursts that may leave now, as far as gaps go: ``most``, or one after a gap.

        What a late wake-up has missed is not made up for: two bursts at once were lost where one was not.
        """
        return most if not self._gap else int(now >= self.opens)

    def left(self, bursts: int, now: int) -> None:
        """``bursts`` have left, whomever they were for."""
        self.opens = now + bursts * self._gap

    def spend(self, rank: int, size: int, now: int) -> None:
        """``size`` bytes have left for ``rank``."""
        rate = self.paths[rank].rate
        if rate != UNLIMITED:
            begin = max(self._next[rank], now - self.limits.quantum)
            self._next[rank] = begin + int(size * _SECOND / rate)
