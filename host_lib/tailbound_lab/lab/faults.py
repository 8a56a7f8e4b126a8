"""Faults of the lab's cables: what is asked for on the way from worker to worker, and what each end must do for it.

A packet crosses two fault programs, one in the sender's cable and one in the receiver's, so an end gets
p' = 1 - sqrt(1 - p) of every probability p. Losses in bursts follow Gilbert and Elliott (Gilbert, "Capacity of a
burst-noise channel", 1960; Elliott, 1963): in the bad state everything is lost, P(bad -> good) = 1 / LEN,
P(good -> bad) = p' / (LEN (1 - p')), so that the stationary share of the bad state is p' and its mean length LEN
packets.

No I/O; ``inject`` loads and attaches.
"""

from __future__ import annotations

import enum
import math
from dataclasses import astuple, dataclass

from tailbound.errors import ConfigError
from tailbound_lab.lab.fault_program import FaultSettings
from tailbound_lab.lab.spec import Burst, LabSpec

_MASK = (1 << 64) - 1


class Way(enum.Enum):
    """One direction of a worker's cable; the value is the number of the end at which its packets come in."""

    FROM_WORKER = 0
    TO_WORKER = 1


@dataclass(frozen=True)
class Fault:
    """Probabilities on the whole way from one worker to another; see ``LabSpec``.

    Raises:
        ConfigError: one of them cannot be.
    """

    loss: float = 0.0
    burst: Burst | None = None
    duplicate: float = 0.0
    corrupt: float = 0.0
    reorder: float = 0.0

    def __post_init__(self) -> None:
        for name in ("loss", "duplicate", "corrupt", "reorder"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} is outside 0 <= p < 1")
        end_settings(self)

    @property
    def needs_checksums(self) -> bool:
        """Whether packets must carry finished checksums.

        A veth only promises one. XDP cannot finish it, so a redirected packet (a duplicate, one out of order) would be
        refused by the receiver's stack; and nobody would notice a flipped bit.
        """
        return self.duplicate > 0 or self.corrupt > 0 or self.reorder > 0

    @property
    def beyond_loss(self) -> tuple[str, ...]:
        """Names of what is asked for besides independent losses."""
        bursts = self.burst is not None and self.burst.loss > 0
        asked = {"bursts": bursts, "duplicates": self.duplicate, "corruption": self.corrupt, "reordering": self.reorder}
        return tuple(name for name, value in asked.items() if value)

    @classmethod
    def of(cls, spec: LabSpec) -> Fault:
        """The faults a lab is built with."""
        return cls(spec.loss, spec.burst, spec.duplicate, spec.corrupt, spec.reorder)


@dataclass(frozen=True)
class FaultCounts:
    """What fault programs did, in packets.

    Attributes:
        seen: packets that faults could hit; one from worker to worker twice, since it passes two cables.
        lost: dropped.
        duplicated: sent twice.
        corrupted: with one bit flipped.
        passed: packets outside the filter.
        reordered: sent past the queue.
        lost_other: of the lost, those that are not UDP.
        overflowed: dropped because a port's queue was full.
        marked: marked in a queue (CE).
        sent: of ``seen``, those that came from a worker.
    """

    seen: int = 0
    lost: int = 0
    duplicated: int = 0
    corrupted: int = 0
    passed: int = 0
    reordered: int = 0
    lost_other: int = 0
    overflowed: int = 0
    marked: int = 0
    sent: int = 0

    def __str__(self) -> str:
        """A sentence for people."""
        share = f" ({100 * self.lost / self.sent:.2f} %)" if self.sent else ""
        other = f", {self.lost_other} of them not UDP" if self.lost_other else ""
        queues = f", {self.overflowed} dropped by full queues, {self.marked} marked"
        return (
            f"of {self.sent} packets {self.lost} lost{share}{other}; {self.duplicated} duplicated, "
            f"{self.corrupted} corrupted, {self.reordered} reordered"
            f"{queues if self.overflowed or self.marked else ''}"
        )

    def __add__(self, other: FaultCounts) -> FaultCounts:
        return FaultCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def _one_of_two(probability: float) -> float:
    """What each of two independent ends must do for ``probability`` together: 1 - sqrt(1 - p), exact for small p."""
    return -math.expm1(0.5 * math.log1p(-probability))


def end_settings(fault: Fault, *seed: int, alone: bool = False) -> FaultSettings:
    """What the end does that ``seed`` names.

    Args:
        fault: what is asked for between two workers.
        seed: the lab's seed and what tells the end from the others.
        alone: this end does all of it by itself (loss in one direction), instead of its part.

    Raises:
        ConfigError: the bursts would have to follow each other faster than their length allows.
    """
    part = float if alone else _one_of_two
    to_bad = to_good = 0.0
    if fault.burst is not None and fault.burst.loss > 0:
        share = part(fault.burst.loss)
        to_good = 1 / fault.burst.length
        to_bad = share * to_good / (1 - share)
        if to_bad > 1:
            raise ConfigError(
                f"bursts of {fault.burst.length:g} packets cannot lose {fault.burst.loss:g} of all: make them longer"
            )
    return FaultSettings(
        seed=seed_of(*seed),
        loss_good=part(fault.loss),
        loss_bad=1.0,
        to_bad=to_bad,
        to_good=to_good,
        duplicate=part(fault.duplicate),
        corrupt=part(fault.corrupt),
        reorder=part(fault.reorder),
    )


def seed_of(*parts: int) -> int:
    """A 64-bit generator state from a seed and what tells one end from the others; never 0.

    Each part goes through the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014, section 5), so that
    neighbouring seeds and ranks give unrelated sequences.
    """
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state or 1
