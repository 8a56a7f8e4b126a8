"""A running P4 switch: forwarding and jobs put in and taken out, counters read.

The same job entries (``kernel.switch.Entry``) as the XDP switch takes; ``Member.ifindex`` is a port's number here.
bmv2 tells nobody what has been put into it, so what is needed to take a job out again is kept (``Held``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tailbound.errors import AttachError, ConfigError
from tailbound.kernel.switch import Entry
from tailbound.switch.p4 import commands
from tailbound.switch.p4.compile import Sizes, compile_switch
from tailbound.switch.p4.process import THRIFT_PORT, Process
from tailbound.switch.p4.runtime import Runtime
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


@dataclass
class Held:
    """What has been put into a switch.

    Attributes:
        entries: jobs by place.
        undo: commands that take a job out again, by place.
        shared: the same for what jobs have in common, by address and port (-1: any).
    """

    entries: dict[int, Entry] = field(default_factory=dict)
    undo: dict[int, list[str]] = field(default_factory=dict)
    shared: dict[tuple[str, int], list[str]] = field(default_factory=dict)


class P4Switch:
    """A running switch and what has been put into it; an ``Aggregator`` (``switch.box``).

    Args:
        runtime: a session with it.
        sizes: what its program was compiled for.
        process: the switch.
        held: what was put into it before.
        changed: called when a job has come or gone.
    """

    form = "sums"

    def __init__(
        self,
        runtime: Runtime,
        sizes: Sizes,
        process: Process,
        held: Held | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.sizes = sizes
        self.process = process
        self.held = Held() if held is None else held
        self.changed = changed
        self.runtime = runtime

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

    @classmethod
    def start(
        cls,
        ports: Mapping[int, str],
        sizes: Sizes | None = None,
        thrift_port: int = THRIFT_PORT,
        folder: Path | None = None,
    ) -> P4Switch:
        """Compiles the program and runs it over the interfaces ``ports`` (number -> name) of this network namespace.

        ``folder``: see ``Process``.

        Raises:
            CapabilityError: a tool is missing.
            AttachError: the switch does not start.
        """
        wanted = sizes or Sizes()
        process = Process.start(compile_switch(wanted), ports, thrift_port, folder)
        try:
            return cls(Runtime(thrift_port), wanted, process)
        except BaseException:
            process.end()
            raise

    def close(self) -> None:
        """Ends the session, and the switch unless it was to outlive this process."""
        self.runtime.close()
        self.process.close()

    def end(self) -> None:
        """Ends the session and the switch."""
        self.runtime.close()
        self.process.end()

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
            ConfigError: the program has no room for it, or the place is taken.
            AttachError: the switch refuses; nothing of the job stays.
        """
        commands.check(entry, place, self.sizes)
        if place in self.held.entries:
            raise ConfigError(f"job {place} of this switch has an entry: take it out first")
        undo = self.held.undo[place] = []
        self.held.entries[place] = entry
        try:
            ports = {rank: [m.ifindex] for rank, m in enumerate(entry.members) if m is not None}
            undo += self._group(commands.JOB_GROUP + place, ports)
            for name, command in _shared(entry, place).items():
                if name not in self.held.shared:
                    self.held.shared[name] = self._tables([command])
            undo += self._tables(commands.job(entry, place))
        except BaseException:
            self.drop(place)
            raise
        self.changed()

    def drop(self, place: int) -> None:
        """Takes a job out; its slots keep its cookie and count as another job's.

        Raises:
            AttachError: the switch refuses.
        """
        held = self.held
        entry = held.entries.pop(place)
        self.runtime.run_all(reversed(held.undo.pop(place)))
        still = {name for place, left in held.entries.items() for name in _shared(left, place)}
        for name in _shared(entry, place).keys() & held.shared.keys() - still:
            self.runtime.run_all(held.shared.pop(name))
        self.changed()

    def entries(self) -> dict[int, Entry]:
        """The jobs put in, by place."""
        return dict(self.held.entries)

    def _tables(self, listed: list[str]) -> list[str]:
        """Adds entries; the commands that take them out again."""
        undo = []
        for command, answer in zip(listed, self.runtime.run_all(listed), strict=True):
            undo.append(f"table_delete {command.split()[1]} {_number(_HANDLE, command, answer)}")
        return undo

    def _group(self, group: int, ports: Mapping[int, list[int]]) -> list[str]:
        """A multicast group: replication id -> ports; the commands that remove it, to be run from the last."""
        self.runtime.run(f"mc_mgrp_create {group}")
        undo = [f"mc_mgrp_destroy {group}"]
        for rid, listed in ports.items():
            command = f"mc_node_create {rid} {' '.join(map(str, listed))}"
            node = _number(_HANDLE, command, self.runtime.run(command))
            self.runtime.run(f"mc_node_associate {group} {node}")
            undo += [f"mc_node_destroy {node}", f"mc_node_dissociate {group} {node}"]
        return undo

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


def _shared(entry: Entry, place: int) -> dict[tuple[str, int], str]:
    """Table entries that jobs at the same address, or the same address and port, have in common."""
    return {
        (entry.address, entry.port): commands.service(entry, place),
        (entry.address, -1): commands.neighbour(entry.address, entry.mac),
    }


def _number(pattern: re.Pattern[str], command: str, answer: str) -> int:
    found = pattern.search(answer)
    if found is None:
        raise AttachError(f"the switch does not do {command!r}, load this version's program: {answer.strip()}")
    return int(found[1])
