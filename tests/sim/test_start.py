"""No rank sends faster than its link is said to be, not even its first rows (clock-24)."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tailbound.transport.pace import PaceConfig
from tailbound.wire.packets import offset_of
from tailbound.wire.schema import HEADER_BYTES, PacketType
from tailbound_lab.simulate.fabric import Burst, S
from tailbound_lab.simulate.layouts import arrange
from tailbound_lab.simulate.ports import HEADERS, Switching
from tailbound_lab.simulate.steps import WIDTH, Team

ROWS, KIND = {PacketType.CONTRIBUTION, PacketType.RESULT}, offset_of("type")
RATE = 12.5e6
#: What may lie in a host's own queue, and a burst more.
MOST = RATE * (PaceConfig.ahead + PaceConfig.quantum) / S + WIDTH + HEADER_BYTES + HEADERS


@pytest.mark.parametrize("multicast", [False, True])
def test_nobody_is_faster_than_the_link_is_said_to_be(multicast: bool) -> None:
    """An interface ten times as fast, as a virtual machine's is; results over ``udp``, or once for all as with XDP."""
    team = Team(arrange("flat", 4, 1 << 18), Switching(rate=10**9), 1, rate=RATE, multicast=multicast)
    send, left = team.network.send, defaultdict[int, list[tuple[int, int]]](list)

    def seen(burst: Burst) -> None:
        if burst.data[KIND] in ROWS:
            left[burst.source].append((team.network.clock, len(burst.data) + burst.count * HEADERS))
        send(burst)

    team.network.send = seen  # type: ignore[method-assign]
    for _ in range(3):
        step = team.step()
        assert step.delivered == step.expected
    team.close()
    assert len(left) == 4
    for bursts in left.values():
        waiting, before = 0.0, 0
        for now, size in bursts:
            waiting = max(0.0, waiting - (now - before) * RATE / S) + size
            assert waiting <= MOST
            before = now
