"""Processes that die: every rank keeps a connection to each other that says nothing, and its end tells (``lifeline``).

So a rank that is killed costs the others the op under way at most, and not a deadline in each of three (clock-14).
An end alone proves nothing, since middleboxes make some, too. ``reliable`` makes the connection anew. Who takes it
lives, even where it is stopped, since its kernel takes connections for it. Where it is refused nobody listens, or a
firewall says so: the rank is asked over UDP. Without an answer its process has ended.

Where a host loses power nothing is refused: its ranks are suspected after three ops.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

from tailbound.collective.transpose import Transpose
from tailbound.errors import TransportError
from tailbound.transport.reliable import Refusal, Reliable
from tailbound.transport.requests import ask_each

log = logging.getLogger("tailbound")

#: Seconds that a peer has to take a connection at least, all of them have at most, and between two attempts.
_PEER, _ALL, _AGAIN = 3.0, 30.0, 0.02
#: Questions over UDP to a rank that refuses connections, and seconds for the answer to each.
_ASKED, _ASK = 2, 0.015


def watch(reliable: Reliable, engine: Transpose) -> None:
    """Tells ``engine`` of processes that die, once there are connections to them."""

    def lost(rank: int) -> bool:
        try:
            for _ in range(_ASKED):
                since = engine.ask(lambda: engine.ask_after(rank))
                time.sleep(_ASK)
                if engine.ask(partial(engine.answered, rank, since)):
                    return False
            engine.ask(lambda: engine.died(rank))
        except TransportError:  # this one is closing
            pass
        return True

    reliable.watch(lost)


def connect(reliable: Reliable, rank: int, peers: Sequence[int], timeout: float) -> None:
    """Connects ``rank`` to ``peers`` at the start of a job, in ``timeout`` seconds or half a minute at most.

    Who cannot be reached is named in the log: nothing will tell of its death. The job goes on, since all else that
    needs TCP is rare.
    """
    until = time.monotonic() + min(timeout, _ALL)

    def reached(peer: int) -> bool:
        while True:
            try:
                # patiently: to the peer the end of a connection that was given up is a death
                reliable.keep(peer, max(_PEER, until - time.monotonic()))
            except Refusal:  # it does not watch yet
                if time.monotonic() >= until:
                    raise
                time.sleep(_AGAIN)
            else:
                return True

    known = ask_each(peers, reached, "tailbound-connect")
    if missing := [peer for peer in peers if peer not in known]:
        log.warning(
            "rank %d: no TCP connection to rank(s) %s, so one of them that dies is waited for in three ops: "
            "let TCP pass between all hosts, on any port",
            rank,
            missing,
        )
