"""The fault program of the lab's cables: settings in, counters out (``xdp_programs/faults.bpf.c``).

Runs on the port of a two-port bridge at which packets come in, and only there: the lab's own namespaces.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from tailbound.errors import ConfigError
from tailbound.kernel import attach as attaching
from tailbound.kernel import load, maps, net, syscalls
from tailbound.wire.packets import DTYPES, layout
from tailbound.wire.schema import FAULT_MAPS, Map

#: A lock for settings and state, in a map of its own, since user space reads and writes those without it.
_LOCK = Map("fault_lock", "lock of settings and state", "tb_lock", (1,), "program", mmap=False)
_PORTS = "fault_ports"
_PROGRAM, _MAP_NAMES = "tb_faults", (*(m.name for m in FAULT_MAPS), _LOCK.name, _PORTS)
_COUNTS = ("seen", "lost", "duplicated", "corrupted", "passed", "reordered", "lost_other", "overflowed", "marked")


def probability(value: float, name: str = "probability") -> int:
    """A probability in units of 2**-32; 1 becomes 2**32 - 1, which means always.

    Raises:
        ConfigError: outside 0..1.
    """
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} is {value}: give 0..1")
    return min(int(value * 2**32), 2**32 - 1)


@dataclass(frozen=True)
class FaultSettings:
    """Probabilities a packet; Bernoulli loss is ``loss_good`` alone.

    Gilbert-Elliott: the chain is in the bad state a share ``to_bad / (to_bad + to_good)`` of packets, in bursts of
    ``1 / to_good`` packets on average.
    """

    seed: int = 1
    loss_good: float = 0.0
    loss_bad: float = 0.0
    to_bad: float = 0.0
    to_good: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    reorder: float = 0.0
    port: int = 0  #: only UDP to or from this port; 0: all of IPv4, and UDP and TCP over IPv6
    rate: int = 0  #: bytes per second of a port that packets wait before; 0: there is none
    queue: int = 0  #: bytes that wait there at most
    mark: int = 0  #: bytes above which packets are marked; 0: none are

    def record(self) -> bytes:
        """``tb_faults`` in its first state.

        Raises:
            ConfigError: a probability outside 0..1, or an invalid port.
        """
        if not 0 <= self.port < 65536:
            raise ConfigError(f"UDP port {self.port}: choose one of 0..65535")
        out = np.zeros(1, DTYPES["tb_faults"])
        # Neighbouring seeds must not give neighbouring sequences, and 0 would stay 0 for ever.
        out["state"] = (self.seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) % 2**64 or 1
        for name in ("loss_good", "loss_bad", "to_bad", "to_good", "duplicate", "corrupt", "reorder"):
            out[name] = probability(getattr(self, name), name)
        for name in ("port", "rate", "queue", "mark"):
            out[name] = getattr(self, name)
        return out.tobytes()


class FaultProgram:
    """The program with its maps; ``attach`` puts it on an interface of the present network namespace.

    Args:
        loader: ``auto``, ``object``, ``bcc`` or ``clang``.

    Raises:
        CapabilityError: compiler, privilege or kernel feature missing.
    """

    def __init__(self, loader: str = "auto") -> None:
        shapes = {m.name: layout(m, cpus=maps.possible_cpus()) for m in (*FAULT_MAPS, _LOCK)}
        self.maps = maps.create((*FAULT_MAPS, _LOCK), shapes, events=False)
        self._links: list[int] = []
        self._ports = False
        try:
            self.maps.fds[_PORTS] = syscalls.map_create(syscalls.MAP_TYPE_DEVMAP, 4, 4, 2, name=_PORTS)
            self.program = load.load("faults.bpf.c", _PROGRAM, {}, _MAP_NAMES, self.maps.fds, loader)
        except BaseException:
            self.maps.close()
            raise

    def attach(self, interface: str, out: str | None = None) -> None:
        """Attaches natively to ``interface``; duplicates and disorder leave by ``out``, the bridge's other port.

        Raises:
            ConfigError: no such interface.
            AttachError: the interface refuses, or a program is there.
        """
        if out is not None:
            port = struct.pack("=I", net.index_of(out))
            for key in range(2):
                syscalls.map_update(self.maps.fds[_PORTS], struct.pack("=I", key), port)
            self._ports = True
        self._links.append(attaching.attach(self.program, interface))

    def set(self, settings: FaultSettings) -> None:
        """Replaces settings and state; packets under way see the old or the new ones.

        Raises:
            ConfigError: an invalid setting, or duplicates or disorder without a port to leave by.
        """
        if (settings.duplicate or settings.reorder) and self._links and not self._ports:
            raise ConfigError(
                "duplicates and packets out of order need the port they leave by: call attach(interface, out)"
            )
        syscalls.map_update(self.maps.fds["faults"], bytes(4), settings.record())

    def counts(self) -> dict[str, int]:
        """By what became of a packet, the counters of ``tb_fault_counts``."""
        counts = self.maps.arrays["fault_counts"]
        return {name: int(counts[name].sum()) for name in _COUNTS}

    def close(self) -> None:
        """Detaches and closes; may be called twice."""
        self.maps.close(*self._links, self.program)
        self._links.clear()
        self.program = -1
