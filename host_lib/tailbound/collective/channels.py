"""How the results of the own rows come to the peers: what there is for it, what is in use, and why. State only.

``collective.fanout`` opens the channels, tries them, and moves this state on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tailbound.kernel.fanout import Fanout
from tailbound.transport.choose import Choice, Facts, choose
from tailbound.transport.multicast import GroupMember
from tailbound.transport.reach import Ears, Reach
from tailbound.transport.sender import Sender, Shared


class Channels:
    """The channels of one rank that reach all its peers at once.

    Args:
        wanted: one of ``choose.RESULTS``.
        facts: what is known before anything is opened.
        sender: of the job.

    Attributes:
        wanted: as above.
        choice: what is done now.
        live: peers that results are for.
        ears: what this rank has heard of the others' trials of the group, for whoever asks.
        reach: whom the own packets to the group reach; None: there is no group.
    """

    def __init__(self, wanted: str, facts: Facts, sender: Sender) -> None:
        self.wanted, self._facts, self._sender = wanted, facts, sender
        self.choice: Choice = choose(wanted, facts)
        self.live: tuple[int, ...] = ()
        self.ears = Ears()
        self.reach: Reach | None = None
        self.fanout: Fanout | None = None
        self.membership: GroupMember | None = None
        #: failed clones that are no longer counted as sent: packets, by rank
        self.failed: dict[int, int] = {}
        self.looked_at = 0

    @property
    def opened(self) -> list[Shared]:
        """Those of the sender; the name of each is that of a ``choose.Result``."""
        return list(self._sender.shared.values())

    def channel(self, name: str) -> Shared | None:
        """The channel called ``name``."""
        return next((channel for channel in self.opened if channel.name == name), None)

    def number(self) -> int | None:
        """The destination of results that is in use; None: each peer by itself."""
        return next((n for n, channel in self._sender.shared.items() if channel.name == self.choice.result), None)

    def learn(self, **facts: Any) -> bool:
        """Takes new facts (fields of ``Facts``) and chooses anew; whether results go another way from now on."""
        self._facts = replace(self._facts, **facts)
        before, self.choice = self.choice, choose(self.wanted, self._facts)
        return before.result != self.choice.result

    def snapshot(self) -> dict[str, Any]:
        """What is done and why, and what left over every channel, in plain types."""
        return {
            **self.choice._asdict(),
            "wanted": self.wanted,
            "live": list(self.live),
            "unreached": None if self._facts.unreached is None else list(self._facts.unreached),
            "group": self.membership.group if self.membership is not None else None,
            "channels": {
                one.name: {
                    "packets": one.counts.packets,
                    "bytes": one.counts.bytes,
                    "calls": one.counts.bursts,
                    "waits": one.counts.waits,
                    "lost": one.counts.lost,
                    "errors": dict(one.counts.errors),
                }
                for one in self.opened
            },
            "clones_failed": {str(rank): packets for rank, packets in self.failed.items()},
        }
