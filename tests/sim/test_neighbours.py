"""Jobs beside each other and beside TCP at a shallow queue: what each of them gets (clock-24)."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest

from tailbound_lab.simulate.engine import Done
from tailbound_lab.simulate.fabric import MS, S
from tailbound_lab.simulate.layouts import Arrangement, Part
from tailbound_lab.simulate.ports import Network, Port, Switching
from tailbound_lab.simulate.steps import Team

RANKS, NUMEL = 3, 64 << 10
#: Bytes of a segment on the wire.
SEGMENT = 1514
#: Ops and flows count after the first time, for as long as the second, ns; flows begin after half of the first.
WARM, LONG = 300 * MS, 500 * MS


class Tcp:
    """A bulk transfer from a host of its own to rank 0: half a window less once a round trip for losses or marks.

    It hears of each loss as of a mark, a round trip later, and waits for no timer: so it is as strong as it can be.

    Attributes:
        came: segments, by when.
    """

    def __init__(self, network: Network, *, ecn: bool) -> None:
        self._network, self._port, self._ecn = network, network.last_hops[0], ecn
        self._out = Port(network.switching.rate / 8, float("inf"))
        self._window, self._slow_start, self._flying, self._lowered = 10.0, True, 0, 0
        self.came: list[int] = []

    def send(self) -> None:
        network = self._network
        while self._flying < int(self._window):
            self._flying += 1
            left = self._out.take(SEGMENT, network.now)
            network.at(left + network.switching.latency, partial(self._arrive, network.now))

    def _arrive(self, sent: int) -> None:
        network, before = self._network, self._port.marks
        left = self._port.take(SEGMENT, network.now)
        worse = not left or (self._ecn and self._port.marks != before)
        if left:
            self.came.append(left)
        network.at(max(left, network.now) + network.switching.latency, partial(self._heard, sent, worse=worse))

    def _heard(self, sent: int, *, worse: bool) -> None:
        self._flying -= 1
        if not worse:
            self._window += 1 if self._slow_start else 1 / self._window
        elif sent >= self._lowered:
            self._lowered, self._slow_start = self._network.now, False
            self._window = max(2.0, self._window / 2)
        self.send()


def share(jobs: int, flows: int, *, mark: int, known: bool = True) -> tuple[list[float], list[float]]:
    """Ops a second of each job, whose ranks wait up to 2 ms before the next one; and the part of the link of each flow.

    Args:
        jobs: on the same hosts.
        flows: of TCP, which know of marks if there are any.
        mark: bytes above which a port marks packets; 0: none are.
        known: ranks know how fast their links are.
    """
    switching = Switching(rate=10**8, buffer=64 << 10, mark=mark)
    parts = [[Part(place % jobs, place // jobs, NUMEL)] for place in range(jobs * RANKS)]
    over: list[list[int]] = [[] for _ in range(jobs)]
    around = Arrangement([list(range(RANKS))] * jobs, parts, "flat")
    with contextlib.closing(Team(around, switching, 1, rate=12.5e6 if known else 0.0)) as team:
        network = team.network
        tcp = [Tcp(network, ecn=bool(mark)) for _ in range(flows)]
        count = range(network.now + WARM, network.now + WARM + LONG)

        def launch(place: int) -> None:
            part = parts[place][0]

            def done(one: Done) -> None:
                assert one.outcome.delivered >= 0.9 * one.outcome.expected
                over[part.job].append(one.finished)
                network.at(network.clock + network.random.randrange(2 * MS), partial(launch, place))

            team.node(part).submit(0, team.data(place), team.result(place), done)

        for place in range(len(parts)):
            network.at(network.now + network.random.randrange(MS), partial(launch, place))
        for flow in tcp:
            network.at(network.now + WARM // 2, flow.send)
        network.run(lambda: network.now >= count.stop, 2 * (WARM + LONG))
        for world in team.worlds:
            assert world.error is None
    ops = [sum(at in count for at in times) / RANKS * S / LONG for times in over]
    return ops, [sum(at in count for at in flow.came) * SEGMENT / 12.5e6 * S / LONG for flow in tcp]


@pytest.mark.parametrize("mark", [16 << 10, 0], ids=["marks", "tail drop"])
def test_tcp_and_a_job_leave_each_other_half(mark: int) -> None:
    """A fair share is half of the link; each keeps four fifths of that. Rule: clock-24."""
    (alone,), _ = share(1, 0, mark=mark)
    (beside,), (tcp,) = share(1, 1, mark=mark)
    assert tcp >= 0.4
    assert beside >= 0.4 * alone


@pytest.mark.parametrize(("mark", "known"), [(16 << 10, True), (0, False)], ids=["marks", "tail drop"])
def test_two_jobs_get_equal_parts(mark: int, *, known: bool) -> None:
    """Rule: clock-24."""
    first, second = share(2, 0, mark=mark, known=known)[0]
    assert (first + second) ** 2 >= 0.95 * 2 * (first**2 + second**2)  # Jain's index
