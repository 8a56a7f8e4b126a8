"""Lives of a program and of its twin, which does the same another way: hostile packets, and what the host does between.

A life is a list of steps that JSON can hold, and follows from its seed. Where the two differ, or one breaks what must
always hold, the life is made as short as it can be, and kept (``corpus``).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from soak.forge import MOST, ROOM, forge, pool_of

#: ("packet", number of its source's address, bytes in hex), or what the host does.
Step = tuple[Any, ...]
#: Packets between two acts of the host; their events fit into a queue.
BATCH = 256
#: Batches between two looks at all memory.
LOOK = 8


class Fault(AssertionError):
    """Something that must always hold did not: at packet ``at`` of a batch, or (-1) some time before."""

    def __init__(self, at: int, words: str) -> None:
        super().__init__(words)
        self.at = at


class Host(Protocol):
    """What the host does between packets; ``moved`` is how far it has moved on, as ``forge`` takes it."""

    moved: NDArray[np.int64]

    def acts(self) -> Iterator[Step]:
        """Some steps."""


class Twins(Protocol):
    """A program and its twin. ``feed``, ``spoil`` and ``look`` raise ``Fault``.

    Attributes:
        counts: packets by verdict, i64[VERDICTS], of all lives.
        foreign: frames that were let pass as nobody's.
        ranks: senders, as ``forge`` takes them.
        length: of a life, in batches; later on, what is far ahead has taken most rows.
    """

    length: int
    counts: NDArray[np.int64]
    foreign: int
    ranks: tuple[int, int]

    def begin(self) -> None:
        """As new."""

    def packets(self, rng: random.Random) -> list[bytes]:
        """Packets for a life."""

    def host(self, rng: random.Random) -> Host:
        """The host of a life."""

    def frame_of(self, data: bytes) -> bytes:
        """An Ethernet frame."""

    def do(self, step: Step) -> None:
        """What the host does, on both sides."""

    def feed(self, payloads: NDArray[np.uint8], sizes: NDArray[np.int64], sources: NDArray[np.int64]) -> None:
        """Feeds packets to both."""

    def spoil(self, rng: random.Random, frames: Sequence[bytes], count: int) -> None:
        """Feeds the program frames that are damaged from Ethernet on."""

    def look(self) -> None:
        """Compares all that the two hold."""

    def close(self) -> None:
        """Gives back what the kernel holds."""


@dataclass
class Lived:
    """What came of a life: packets fed; and if something went wrong, what, and all steps up to there."""

    packets: int
    words: str = ""
    steps: Sequence[Step] = ()


def live(twins: Twins, seed: int, known: Sequence[bytes] = (), over: Callable[[], bool] = lambda: False) -> Lived:
    """Lives the life of ``seed``, whose packets are like its own and those ``known``, until it is ``over()``."""
    rng = random.Random(seed)
    fresh = twins.packets(rng)
    pool, lengths = pool_of([*fresh, *known])
    frames = [twins.frame_of(data) for data in fresh]
    twins.begin()
    host, lived = twins.host(rng), Lived(0)
    steps: list[Step] = []
    state = np.array([rng.getrandbits(64)], np.uint64)
    words = np.zeros(ROOM, np.uint64)
    for number in range(twins.length):
        if over():
            break
        for act in host.acts():
            steps.append(act)
            twins.do(act)
        batch = np.zeros((BATCH, MOST), np.uint8), np.zeros(BATCH, np.int64), np.zeros(BATCH, np.int64)
        forge(state, pool, lengths, host.moved, twins.ranks, *batch, words)
        steps.append(("batch", *batch))
        try:
            twins.feed(*batch)
            twins.spoil(rng, frames, 2)
            if number % LOOK == LOOK - 1:
                twins.look()
        except Fault as fault:
            return Lived(lived.packets, str(fault), [*_single(steps, fault.at)])
        lived.packets += BATCH + 2
    return lived


def _single(steps: Sequence[Step], last: int) -> Iterator[Step]:
    """Steps of one packet each; the last batch ends with the packet ``last``, unless that is -1."""
    for number, step in enumerate(steps):
        if step[0] != "batch":
            yield step
            continue
        payloads, sizes, sources = step[1:]
        end = last + 1 if number == len(steps) - 1 and last >= 0 else len(sizes)
        for data, size, source in zip(payloads[:end], sizes, sources, strict=False):
            yield "packet", int(source), data[:size].tobytes().hex()


def relive(twins: Twins, steps: Sequence[Step]) -> str:
    """Does the steps of a life; what goes wrong, in words, or nothing."""
    twins.begin()
    try:
        for packets, group in itertools.groupby(steps, lambda step: step[0] == "packet"):
            if not packets:
                for step in group:
                    twins.do(step)
                continue
            batch = list(group)
            for i in range(0, len(batch), BATCH):
                part = batch[i : i + BATCH]
                pool, sizes = pool_of([bytes.fromhex(data) for _, _, data in part])
                twins.feed(pool, sizes, np.array([source for _, source, _ in part]))
        twins.look()
    except Fault as fault:
        return str(fault)
    return ""
