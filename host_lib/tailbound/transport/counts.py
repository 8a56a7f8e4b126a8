"""What happened to the packets for one destination: plain counters."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PeerCounts:
    """What happened to the packets for one peer."""

    packets: int = 0  #: handed to the kernel
    bytes: int = 0  #: UDP payload handed to the kernel
    bursts: int = 0  #: system calls that took packets
    waits: int = 0  #: times the socket was full and the sender waited
    lost: int = 0  #: packets given up
    errors: dict[str, int] = field(default_factory=dict)  #: refused calls by errno name
