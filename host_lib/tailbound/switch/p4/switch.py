"""A running P4 switch: forwarding and jobs put in, counters read.

The same job entries (``kernel.switch.Entry``) as the XDP switch takes; ``Member.ifindex`` is a port's number here. Jobs
end with the switch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tailbound.errors import AttachError, ConfigError
from tailbound.kernel import ethtool, net
from tailbound.kernel.switch import Entry
from tailbound.switch.box import Box, Port, check_ports
from tailbound.switch.job import ip_text, mac_bytes
from tailbound.switch.p4 import commands
from tailbound.switch.p4.compile import Sizes, compile_switch
from tailbound.switch.p4.process import THRIFT_PORT, Process
from tailbound.switch.p4.runtime import Runtime
from tailbound.switch.p4.tools import COMPILER, RUNTIME, SWITCH, tool
from tailbound.wire.address import is_ipv6
from tailbound.wire.schema import VERDICTS

_HANDLE = re.compile(r"handle (\d+)")
_COUNTER = re.compile(r"(\d+) packets")
#: Counters of a port: name -> in the program.
_PORT_COUNTERS = {
    "ours": f"{commands.INGRESS}.ours",
    "foreign": f"{commands.INGRESS}.foreign",
    "results": f"{commands.EGRESS}.results",
    "answers": f"{commands.EGRESS}.answers",
}


class P4Switch:
    """Runs the program over ports, and takes jobs, as ``kernel.switch.Switch`` does.

    Args:
        ports: port number -> interface, in the network namespace of this thread.
        sizes: what the program is compiled for.
        thrift_port: where bmv2 takes commands.

    Raises:
        CapabilityError: a tool is missing.
        AttachError: the switch does not start.
    """

    form = "sums"

    def __init__(self, ports: Mapping[int, str], sizes: Sizes | None = None, thrift_port: int = THRIFT_PORT) -> None:
        self.sizes = sizes or Sizes()
        self._entries: dict[int, Entry] = {}
        self._known: set[str] = set()  # entries that jobs at one address, or at one port of it, share
        self.process = Process(compile_switch(self.sizes), ports, thrift_port)
        try:
            self.runtime = Runtime(thrift_port)
        except BaseException:
            self.process.close()
            raise

    @property
    def slots(self) -> int:
        """Of all jobs together."""
        return self.sizes.slots

    @property
    def width(self) -> int:
        """Codes of the widest row."""
        return self.sizes.codes

    def alive(self) -> bool:
        """Whether bmv2 runs."""
        return self.process.alive()

    def close(self) -> None:
        """Ends the session and the switch; may be called twice."""
        self.runtime.close()
        self.process.close()

    # -- forwarding ---------------------------------------------------------------------------------

    def connect(self, stations: Mapping[bytes, int], ports: Iterable[int]) -> None:
        """Static entries (Ethernet address -> port); what has none is flooded to all of ``ports`` but its own.

        Raises:
            AttachError: the switch refuses.
        """
        self._group(commands.FLOOD_GROUP, {0: sorted(ports)})
        self.runtime.run_all([*commands.stations(stations), commands.flooding(), commands.queues()])

    # -- jobs ---------------------------------------------------------------------------------------

    def put(self, place: int, entry: Entry) -> None:
        """Installs a job at ``place``, in the order in which packets may find it.

        Raises:
            ConfigError: the program has no room for it.
            AttachError: the switch refuses.
        """
        commands.check(entry, self.sizes)
        self._group(commands.JOB_GROUP + place, {r: [m.ifindex] for r, m in enumerate(entry.members) if m is not None})
        shared = [command for command in commands.shared(entry, place) if command.partition("=>")[0] not in self._known]
        self._known.update(command.partition("=>")[0] for command in shared)
        self.runtime.run_all([*shared, *commands.job(entry, place)])
        self._entries[place] = entry

    def entries(self) -> dict[int, Entry]:
        """The jobs put in, by place."""
        return dict(self._entries)

    def _group(self, group: int, ports: Mapping[int, list[int]]) -> None:
        """A multicast group: replication id -> ports."""
        self.runtime.run(f"mc_mgrp_create {group}")
        for rid, listed in ports.items():
            command = f"mc_node_create {rid} {' '.join(map(str, listed))}"
            node = _number(_HANDLE, command, self.runtime.run(command))
            self.runtime.run(f"mc_node_associate {group} {node}")

    # -- counters -----------------------------------------------------------------------------------

    def register(self, name: str) -> NDArray[np.int64]:
        """All cells of a register, by its name in the program."""
        _, _, cells = self.runtime.run(f"register_read {name}").partition(f"{name}=")
        return np.array([int(cell) for cell in cells.split(",")], np.int64)

    def ledger(self, place: int) -> NDArray[np.int64]:
        """Counters of a job, i64[ranks + 1, VERDICTS]; the last row is of senders that are not to be trusted."""
        whole = self.register(commands.LEDGER)
        rows = whole.reshape(self.sizes.jobs, self.sizes.ranks + 1, VERDICTS)
        out: NDArray[np.int64] = rows[place]
        return out

    def slot_state(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """By slot: the cookie of the job that used it last, and whether its row is final."""
        cookies, final = (self.register(name) for name in commands.SLOT_STATE)
        return cookies & 0xFFFFFFFF, final

    def rows_of(self, entry: Entry) -> tuple[int, int]:
        """Rows of a job in its slots: final ones, and open ones."""
        cookies, finals = (found[entry.base : entry.base + entry.rows] for found in self.slot_state())
        own = cookies == entry.cookie
        final = int(np.count_nonzero(own & (finals == 1)))
        return final, int(own.sum()) - final

    def port_counters(self, ifindex: int) -> dict[str, int]:
        """Packets of a port: for the switch, others, results and answers sent; and what the drop simulator lost."""
        answers = self.runtime.run_all(f"counter_read {name} {ifindex}" for name in _PORT_COUNTERS.values())
        counts = {name: _number(_COUNTER, name, text) for name, text in zip(_PORT_COUNTERS, answers, strict=True)}
        lost = (f"register_read {control}.drops.count {ifindex}" for control in (commands.INGRESS, commands.EGRESS))
        came, went = (int(text.partition("=")[2]) for text in self.runtime.run_all(lost))
        return counts | {"lost_in": came, "lost_out": went}


def _number(pattern: re.Pattern[str], command: str, answer: str) -> int:
    found = pattern.search(answer)
    if found is None:
        raise AttachError(f"the switch does not do {command!r}, load this version's program: {answer.strip()}")
    return int(found[1])


def open_p4(
    ports: Sequence[str],
    address: str,
    *,
    mac: str | None = None,
    stations: Mapping[str, str] | None = None,
    sizes: Sizes | None = None,
    thrift_port: int = THRIFT_PORT,
) -> Box[P4Switch]:
    """Compiles the program and runs it over ``ports``; closing the box ends it.

    Offloads of the ports are turned off, as bmv2 needs (``kernel.ethtool.whole_frames``); those of whatever else hands
    it frames, the other end of a veth, are not its business.

    Args:
        address: IPv4 address of the switch; it answers ARP for it once there is a job.
        mac: its Ethernet address; None: that of the first port.
        stations: Ethernet address -> port's name; what is sent to others is flooded.
        sizes: what the program is compiled for.
        thrift_port: where bmv2 takes commands.

    Raises:
        ConfigError: an invalid port, address or size.
        CapabilityError: p4c or bmv2 is missing.
        AttachError: the switch does not start.
    """
    check_ports(ports)
    if is_ipv6(ip_text(address)):
        raise ConfigError(
            f"address {address}: the P4 switch sums packets of IPv4; give it an IPv4 address, or run an XDP switch "
            "(`tailbound switch up`)"
        )
    numbers = {name: number for number, name in enumerate(ports)}
    for name in ports:
        net.index_of(name)
    own = net.mac_of(ports[0]) if mac is None else mac_bytes(mac)
    static = {mac_bytes(text): _port(numbers, name) for text, name in (stations or {}).items()}
    for needed in (COMPILER, SWITCH, RUNTIME):  # before anything is changed
        tool(needed)
    for name in ports:
        try:
            ethtool.whole_frames(name)
        except OSError as error:
            raise ConfigError(
                f"port {name}: {error.strerror}; name interfaces whose offloads can be turned off"
            ) from error
    switch = P4Switch({number: name for name, number in numbers.items()}, sizes, thrift_port)
    try:
        switch.connect(static, list(numbers.values()))
    except BaseException:
        switch.close()
        raise
    return Box(switch, [Port(name, number) for name, number in numbers.items()], address, own)


def _port(numbers: Mapping[str, int], name: str) -> int:
    if name not in numbers:
        raise ConfigError(f"this switch has no port {name}; choose one of: {', '.join(numbers)}")
    return numbers[name]
