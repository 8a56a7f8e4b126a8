"""What a lab should be like: the settings of ``tailbound lab run`` and how they are written.

Pure: strings in, values out, a ``ConfigError`` that names the option and a right example otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tailbound.errors import ConfigError
from tailbound.settings.kinds import parse_rate
from tailbound.transport.config import DEFAULT_PORT
from tailbound.wire.schema import MAX_RANKS

DEFAULT_MTU = 1500
#: Mean burst length in packets where ``--burst-loss`` names none.
DEFAULT_BURST = 5.0

_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_size(text: str) -> int:
    """Bytes of ``25MiB``, ``64KiB`` or ``1000000``.

    Raises:
        ConfigError: anything else, or less than 4.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?b)?", text.strip().lower())
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size < 4:
        raise ConfigError(f"{text!r} is not a size of at least 4 bytes: write for example 25MiB or 64KiB")
    return size


def parse_probability(text: str, option: str = "probability") -> float:
    """A probability below one, written ``0.01`` or ``1%``.

    Raises:
        ConfigError: not a number, or outside 0 <= p < 1.
    """
    words = text.strip()
    try:
        value = float(words[:-1]) / 100 if words.endswith("%") else float(words)
    except ValueError:
        raise ConfigError(f"{option} {text!r} is not a probability: write for example 0.01 or 1%") from None
    if not 0 <= value < 1:
        raise ConfigError(f"{option} {text!r} is outside 0 <= p < 1: write for example 0.01 or 1%")
    return value


@dataclass(frozen=True)
class Burst:
    """Losses in bursts: ``loss`` of all packets on the way from worker to worker, ``length`` packets a burst."""

    loss: float
    length: float = DEFAULT_BURST


def parse_burst(text: str) -> Burst:
    """``P`` or ``P:LEN``: mean loss and mean burst length in packets.

    Raises:
        ConfigError: P is no probability, or LEN is not a number of at least 1.
    """
    loss, colon, length = text.partition(":")
    probability = parse_probability(loss, "burst loss")
    if not colon:
        return Burst(probability)
    try:
        mean = float(length)
    except ValueError:
        mean = 0.0
    if not 1 <= mean <= 1e6:
        raise ConfigError(f"burst length {length!r} must be a number of packets from 1: write for example 0.01:8")
    return Burst(probability, mean)


@dataclass(frozen=True)
class Straggler:
    """One slow rank.

    Attributes:
        rank: which.
        ms: for how long it stands still each time, in milliseconds.
        every_ms: mean time from one stop to the next, in milliseconds; None: once a step, by the
            command itself, which reads ``TAILBOUND_LAB_STRAGGLER`` (see ``tailbound_lab.lab.straggler``).
    """

    rank: int
    ms: float
    every_ms: float | None

    def __str__(self) -> str:
        every = "step" if self.every_ms is None else f"{self.every_ms:g}"
        return f"{self.rank}:{self.ms:g}:{every}"


def parse_straggler(text: str) -> Straggler:
    """``RANK:MS`` (stopped at random, every 4 x MS on average), ``RANK:MS:EVERY_MS`` or ``RANK:MS:step``.

    Raises:
        ConfigError: not of this form, or not positive, or EVERY_MS not above MS.
    """
    example = "write for example 3:40, 3:40:200 or 3:40:step"
    parts = text.strip().split(":")
    if not 2 <= len(parts) <= 3:
        raise ConfigError(f"straggler {text!r} is not RANK:MS[:EVERY_MS|:step]: {example}")
    try:
        rank, ms = int(parts[0]), float(parts[1])
        every: float | None = 4 * ms
        if len(parts) == 3:
            every = None if parts[2] == "step" else float(parts[2])
    except ValueError:
        raise ConfigError(f"straggler {text!r} is not RANK:MS[:EVERY_MS|:step]: {example}") from None
    if rank < 0 or not 0 < ms <= 3_600_000:
        raise ConfigError(f"straggler {text!r}: the rank must be at least 0 and MS above 0: {example}")
    if every is not None and not ms < every <= 36_000_000:
        raise ConfigError(f"straggler {text!r}: EVERY_MS must be above MS, or the rank would never run: {example}")
    return Straggler(rank, ms, every)


#: Bits per second that foreign bursts have at most: those of a simulated link, which may be as fast.
MOST_BACKGROUND = 10**12


@dataclass(frozen=True)
class Background:
    """Traffic of other tenants: bursts towards every worker, each worker's apart from the others'.

    Attributes:
        rate: bits per second while a burst lasts.
        on_ms: mean length of a burst in milliseconds; lengths are uniform in 0.8..1.2 times that, so they are bounded.
        off_ms: mean pause between the bursts towards one worker; pauses are exponential.
    """

    rate: int
    on_ms: float
    off_ms: float

    def __post_init__(self) -> None:
        if not 1_000 <= self.rate <= MOST_BACKGROUND:
            raise ConfigError(f"background rate {self.rate} bit/s is outside 1kbit..{MOST_BACKGROUND / 1e9:g}gbit")
        if not (0 < self.on_ms <= 10_000 and 1 <= self.off_ms <= 3_600_000):
            raise ConfigError(
                f"background bursts of {self.on_ms:g} ms every {self.off_ms:g} ms: give 0 < ON <= 10000 and OFF >= 1"
            )

    def __str__(self) -> str:
        return f"{self.rate / 1e6:g}mbit:{self.on_ms:g}:{self.off_ms:g}"


def parse_background(text: str) -> Background:
    """``RATE:ON_MS:OFF_MS``; a process that sends makes 10 Gbit/s at most.

    Raises:
        ConfigError: not of this form, or out of range.
    """
    parts = text.strip().split(":")
    example = "write for example 800mbit:100:3000"
    if len(parts) != 3:
        raise ConfigError(f"background {text!r} is not RATE:ON_MS:OFF_MS: {example}")
    try:
        on_ms, off_ms = float(parts[1]), float(parts[2])
    except ValueError:
        raise ConfigError(f"background {text!r}: ON_MS and OFF_MS are numbers of milliseconds: {example}") from None
    found = Background(parse_rate(parts[0]), on_ms, off_ms)
    if not 1_000_000 <= found.rate <= 10 * 10**9:
        raise ConfigError(f"background rate {found.rate} bit/s is outside 1mbit..10gbit")
    return found


@dataclass(frozen=True)
class LabSpec:
    """A lab. Loss, duplication and corruption are probabilities on the whole way from one worker to another.

    Attributes:
        workers: number of workers, 1..256.
        rate: bits per second of every worker's links, each way; None: as fast as the machine.
        loss: independent losses.
        burst: losses in bursts, on top of ``loss``.
        duplicate: UDP packets that arrive twice.
        corrupt: packets in which one bit is flipped after the UDP header.
        reorder: UDP packets that leave before or after their neighbours.
        background: bursts of foreign traffic from the switch towards the workers, on both links.
        straggler: one slow rank.
        wire: packets have wire size on both links: XDP at the far end of every worker's veth keeps
            super-frames from leaving the worker. Faults imply it.
        seed: of losses, of the straggler's stops and of the background.
        mtu: of every interface, in bytes.
        cables: build cables with idle fault programs where nothing asks for them, so that rate and
            faults can be set later. Implies wire size.
        port: UDP port of the job (``TAILBOUND_PORT``).
        switch: the switch sums for the job of all workers (``TAILBOUND_SWITCH``). Implies wire size.
        queue: bytes that wait before a worker's link at most, in the network; None: 25 ms at its rate. Implies wire
            size.
        ecn: packets that come when a quarter of that waits are marked (CE) if their sender knows of that.
        ipv6: workers have addresses of IPv6 on the data link, and none of IPv4.
    """

    workers: int
    rate: int | None = None
    loss: float = 0.0
    burst: Burst | None = None
    duplicate: float = 0.0
    corrupt: float = 0.0
    straggler: Straggler | None = None
    wire: bool = False
    seed: int = 1
    mtu: int = DEFAULT_MTU
    cables: bool = False
    port: int = DEFAULT_PORT
    reorder: float = 0.0
    background: Background | None = None
    switch: bool = False
    queue: int | None = None
    ecn: bool = False
    ipv6: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MAX_RANKS:
            raise ConfigError(f"workers {self.workers} is outside 1..{MAX_RANKS}")
        for option in ("loss", "duplicate", "corrupt", "reorder"):
            if not 0 <= getattr(self, option) < 1:
                raise ConfigError(f"{option} {getattr(self, option)} is outside 0 <= p < 1")
        if self.burst is not None and not (0 <= self.burst.loss < 1 and self.burst.length >= 1):
            raise ConfigError(f"burst loss {self.burst} needs 0 <= loss < 1 and a length of at least 1")
        if self.rate is not None and self.rate < 8_000:
            raise ConfigError(f"rate {self.rate} bit/s is below 8000: give at least 8kbit")
        if self.queue is not None and (self.rate is None or self.queue < 4 * self.mtu):
            raise ConfigError(f"a queue of {self.queue} bytes: give a rate, too, and four packets at least")
        if self.ecn and self.queue is None:
            raise ConfigError("ecn marks packets that wait in a queue of known size: give queue, too")
        if not 576 <= self.mtu <= 9000:
            raise ConfigError(f"MTU {self.mtu} is outside 576..9000")
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} is outside 1..65535")
        if self.switch and self.workers >= MAX_RANKS:
            raise ConfigError(f"a switch for {self.workers} workers: it takes up to {MAX_RANKS - 1}")
        if self.straggler is not None and self.straggler.rank >= self.workers:
            raise ConfigError(f"straggler rank {self.straggler.rank} does not exist: ranks are 0..{self.workers - 1}")

    @property
    def has_faults(self) -> bool:
        """Whether any packet is to be lost, doubled, spoilt or put out of order."""
        burst = self.burst.loss if self.burst is not None else 0.0
        return any(p > 0 for p in (self.loss, burst, self.duplicate, self.corrupt, self.reorder))

    @property
    def has_fault_programs(self) -> bool:
        """Whether the cables carry fault programs, idle ones included."""
        return self.cables or self.has_faults or self.queue is not None

    @property
    def queued(self) -> tuple[int, int] | None:
        """Bytes that wait before a link at most, and above how many of them packets are marked (0: none are)."""
        return None if self.queue is None else (self.queue, self.queue // 4 if self.ecn else 0)

    @property
    def wire_size(self) -> bool:
        """Whether packets have wire size everywhere: asked for, or forced by the fault programs or the switch's."""
        return self.wire or self.has_fault_programs or self.switch

    @property
    def has_cables(self) -> bool:
        """Whether workers are joined to the switch by cable namespaces instead of directly."""
        return self.rate is not None or self.has_fault_programs
