"""A P4 switch as a job's user sees it: ports by name, jobs in and out; the counterpart of ``tailbound.switch.box``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tailbound.errors import ConfigError
from tailbound.kernel import ethtool
from tailbound.kernel.switch import Entry, Member
from tailbound.p4.compile import Sizes
from tailbound.p4.process import THRIFT_PORT
from tailbound.p4.switch import P4Switch
from tailbound.switch.box import environment
from tailbound.switch.job import JobSpec, mac_bytes, place
from tailbound.transport.switch import CODES, FORM

__all__ = ["P4Box"]


class P4Box:
    """A running switch and the names of its ports.

    Args:
        switch: it.
        ports: interfaces in the order of their numbers.
        address, mac: of the switch, as workers see it.
    """

    def __init__(self, switch: P4Switch, ports: Sequence[str], address: str, mac: bytes) -> None:
        self.switch = switch
        self.ports = tuple(ports)
        self.address = address
        self.mac = mac

    @classmethod
    def open(
        cls,
        ports: Sequence[str],
        address: str,
        *,
        mac: str,
        stations: Mapping[str, str] | None = None,
        sizes: Sizes | None = None,
        thrift_port: int = THRIFT_PORT,
    ) -> P4Box:
        """Compiles the program and runs it over ``ports``, interfaces of this network namespace.

        Offloads of the ports are turned off, as bmv2 needs (``kernel.ethtool.whole_frames``); those of whatever else
        hands it frames, the other end of a veth, are not its business.

        Args:
            address, mac: of the switch; it answers ARP for the address once there is a job.
            stations: Ethernet address -> port's name; what is sent to others is flooded.

        Raises:
            ConfigError: a port, address or size that cannot be.
            CapabilityError: p4c or bmv2 is missing.
            AttachError: the switch does not start.
        """
        if not ports or len(set(ports)) < len(ports):
            raise ConfigError(f"ports {', '.join(ports) or '(none)'}: give at least one, and each once")
        numbers = {name: number for number, name in enumerate(ports)}
        own, static = (
            mac_bytes(mac),
            {mac_bytes(text): _number(numbers, name) for text, name in (stations or {}).items()},
        )
        for name in ports:
            try:
                ethtool.whole_frames(name)
            except OSError as error:
                raise ConfigError(f"port {name}: {error.strerror}; name Ethernet interfaces that are here") from error
        switch = P4Switch.start({number: name for name, number in numbers.items()}, sizes, thrift_port)
        try:
            switch.connect(static, list(numbers.values()))
        except BaseException:
            switch.close()
            raise
        return cls(switch, ports, address, own)

    def close(self) -> None:
        """Ends the switch."""
        self.switch.close()

    def add(self, spec: JobSpec) -> Entry:
        """Takes a job in.

        Raises:
            ConfigError: no room, something of it is another job's, or a port is not the switch's.
            AttachError: the switch refuses.
        """
        number, base = place(spec, self.switch.entries(), self.switch.sizes.slots)
        numbers = {name: number for number, name in enumerate(self.ports)}
        members = tuple(Member(w.address, mac_bytes(w.mac), _number(numbers, w.port)) for w in spec.ranks)
        entry = Entry(spec.cookie, self.address, self.mac, spec.port, base, spec.rows, spec.headroom, members)
        self.switch.put(number, entry)
        return entry

    def environment(self, entry: Entry) -> dict[str, str]:
        """The variables by which the workers of a job learn of their switch."""
        return environment(entry) | {FORM: "sums", CODES: str(self.switch.sizes.codes)}

    def remove(self, cookie: int) -> bool:
        """Takes a job out; its slots are free at once.

        Returns:
            Whether it was there.
        """
        for number, entry in self.switch.entries().items():
            if entry.cookie == cookie:
                self.switch.drop(number)
                return True
        return False


def _number(numbers: Mapping[str, int], name: str) -> int:
    if name not in numbers:
        raise ConfigError(f"{name} is no port of this switch; there are: {', '.join(numbers)}")
    return numbers[name]
