"""Which way an all-reduce goes and how its results are sent, from what was asked for and what was found. Pure.

The two halves of a job are chosen apart: whether a switch sums, or the ranks do (transpose), and how an owner's results
come to its N - 1 peers: a send to each (``peers``), one burst that this host's kernel clones (``fanout``), or one that
the network multiplies (``multicast``). ``auto`` is ``fanout`` where it works, else ``peers``. Multicast has to be
asked for, and is in use while it is known to be delivered: all owners publish at about the same time, and with it each
of them can fill every receiver's link by itself (docs/transport.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from tailbound.errors import ConfigError

Collective = Literal["transpose", "switch"]
Result = Literal["peers", "fanout", "multicast"]
AskedResult = Literal["auto", "peers", "fanout", "multicast"]
#: What may be asked for.
RESULTS = get_args(AskedResult)


class Tried(NamedTuple):
    """What came of trying a channel."""

    works: bool
    why: str = ""  #: it does not


WORKS = Tried(works=True)


@dataclass(frozen=True)
class Facts:
    """What was found.

    Attributes:
        ranks: world size.
        datapath: name of the datapath.
        switch: a switch sums the rows of this job.
        fanout: whether the kernel can clone bursts here; None: not tried.
        multicast: whether this rank has a group to send to; None: not tried.
        unreached: ranks that the group is not known to reach; None: not known yet.
    """

    ranks: int
    datapath: str = "xdp"
    switch: bool = False
    fanout: Tried | None = None
    multicast: Tried | None = None
    unreached: tuple[int, ...] | None = None


class Choice(NamedTuple):
    """What is done, and why."""

    collective: Collective
    result: Result
    reason: str


def check(result: str) -> None:
    """Refuses what cannot be asked for.

    Raises:
        ConfigError: an unknown name.
    """
    if result not in RESULTS:
        raise ConfigError(f"result {result!r}: choose one of {', '.join(RESULTS)}")


def worth_trying(result: str, ranks: int, datapath: str) -> tuple[bool, bool]:
    """Whether fan-out is to be attached, and whether a group is to be joined, before anything is chosen."""
    if datapath == "udp" or ranks <= 2:
        return False, False
    return result != "peers", result == "multicast"


def choose(wanted: str, facts: Facts) -> Choice:
    """The way for a job that asked for results by ``wanted`` (one of ``RESULTS``)."""
    if facts.switch:
        return Choice("switch", "peers", "a switch sums and sends the results")
    result, reason = _result(wanted, facts)
    return Choice("transpose", result, reason)


def _result(wanted: str, facts: Facts) -> tuple[Result, str]:
    if wanted == "peers":
        return "peers", "asked for"
    if facts.ranks <= 2:
        return "peers", "there are no two peers that get the same"
    if facts.datapath == "udp":
        return "peers", "the udp datapath sends to each peer by itself"
    fanout, multicast = (way is not None and way.works for way in (facts.fanout, facts.multicast))
    if wanted == "multicast":
        if multicast and facts.unreached == ():
            return "multicast", "asked for, and the network delivers it to all live peers"
        why = _holes(facts.unreached) if multicast else _not("multicast", facts.multicast)
        return ("fanout", why) if fanout else ("peers", f"{why}; {_not('fan-out', facts.fanout)}")
    reason = "asked for" if wanted == "fanout" else "this kernel clones bursts"
    return ("fanout", reason) if fanout else ("peers", _not("fan-out", facts.fanout))


def _not(what: str, tried: Tried | None) -> str:
    return f"no {what}: {'not tried' if tried is None else tried.why}"


def _holes(unreached: tuple[int, ...] | None) -> str:
    if unreached is None:
        return "whether the network delivers multicast is being tried"
    return f"multicast does not reach {', '.join(map(str, unreached))}"
