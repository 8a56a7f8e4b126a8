"""In which order packets leave: bursts, and whose turn it is. Pure arithmetic, no I/O.

Every sender begins with the rank after its own, and takes bursts from the peers' runs in turn, so that at no moment
all ranks send to the same one (OptiReduce's transpose schedule, NSDI'25 section 3.2, per burst instead of per round).
"""

from __future__ import annotations

from collections.abc import Iterator

from tailbound.errors import ConfigError

#: A UDP GSO send holds at most this many segments (UDP_MAX_SEGMENTS before Linux 6.9) ...
MAX_SEGMENTS = 64
#: ... and this many bytes of UDP payload (65535 - 20 - 8).
MAX_BYTES = 65507


def burst_packets(stride: int) -> int:
    """Packets of ``stride`` bytes in one GSO send: 44 at 1472 bytes, 7 at 8960.

    Raises:
        ConfigError: not even one fits.
    """
    if not 0 < stride <= MAX_BYTES:
        raise ConfigError(f"packets of {stride} bytes: a UDP payload has 1..{MAX_BYTES}")
    return min(MAX_SEGMENTS, MAX_BYTES // stride)


def stagger(rank: int, ranks: int) -> Iterator[int]:
    """The other ranks, beginning with the one after ``rank``: ``rank + 1, rank + 2, ...`` modulo ``ranks``."""
    return ((rank + d) % ranks for d in range(1, ranks))
