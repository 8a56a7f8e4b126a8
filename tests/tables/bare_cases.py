"""Packets that carry a check in a job with a key, whose last rank is a switch without one. Rule: auth-7."""

from __future__ import annotations

import itertools
from typing import Any

import cases
from tailbound.wire.schema import Flag, PacketType, Tagging, Verdict

SWITCH = cases.RANKS - 1
_NOW, _BEFORE = Tagging.ON | Tagging.BARE, Tagging.ON | Tagging.BARE_BEFORE
_TAKEN, _FORGED = Verdict.RESULT_TAKEN, Verdict.FORGED


_seqs = itertools.count(cases.RESULT_SEQ)


def _result(op: int = cases.OP, sender: int = SWITCH, flags: int = Flag.SWITCHED, **more: Any) -> bytes:
    """Each into a row of its own."""
    return cases.result(sender, op=op, flags=flags, seq=next(_seqs), **more)


_OLD = _result(cases.MAP_SINCE - 1, map_id=cases.MAP_BEFORE)
_ECHO = cases.control_packet(PacketType.ECHO, bytes(16), sender=SWITCH)
_PROBE = cases.control_packet(PacketType.PROBE, bytes(16), sender=SWITCH)

#: By name: whose packets carry tags, a packet, and what becomes of it.
CASES: dict[str, tuple[Tagging, bytes, Verdict]] = {
    "a result of the switch": (_NOW, _result(), _TAKEN),
    "with sums": (_NOW, _result(flags=Flag.SUMS), _TAKEN),
    "damaged": (_NOW, cases.flipped(_result(), 8 * 100), Verdict.CORRUPT),
    "not said to be a switch's": (_NOW, _result(flags=0), _FORGED),
    "in another rank's name": (_NOW, _result(sender=1), _FORGED),
    "a contribution": (_NOW, cases.contribution(SWITCH, flags=Flag.SWITCHED), _FORGED),
    "a word": (_NOW, cases.ready(SWITCH, flags=Flag.SWITCHED), _FORGED),
    "an op of the map before": (_NOW, _OLD, _FORGED),
    "an op of the map before, which had the switch": (_BEFORE, _OLD, _TAKEN),
    "an op of a map without the switch": (_BEFORE, _result(), _FORGED),
    "where there is no such switch": (Tagging.ON, _result(), _FORGED),
    "an echo": (_NOW, _ECHO, Verdict.ECHO_TAKEN),
    "an echo where there is no such switch": (Tagging.ON, _ECHO, _FORGED),
    "a probe": (_NOW, _PROBE, _FORGED),
    "a rank's row with its tag": (_NOW, cases.tagged(cases.contribution(1)), Verdict.STORED),
    "a rank's row without": (_NOW, cases.contribution(1), _FORGED),
}


def wrong(world: Any) -> dict[str, Verdict]:
    """What ``world``, which is armed, makes of a case if not what it should; by name."""
    found = {}
    for name, (tagged, data, verdict) in CASES.items():
        world.control(tagged=int(tagged))
        became = world.take(data)[0]
        if became != verdict:
            found[name] = became
    return found
