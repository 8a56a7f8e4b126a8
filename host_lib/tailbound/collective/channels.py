"""One burst to all peers: opens what can do it, follows who is there, and says what is done instead.

Nothing here fails a job: an event and ``stats()`` tell what cannot be had. An owner's results come to its N - 1 peers
by a send to each (``peers``), one burst that this host's kernel clones (``fanout``), or one that the network multiplies
(``multicast``). ``auto`` is ``fanout`` where it works, else ``peers``. Multicast has to be asked for: all owners
publish at about the same time, and each of them can fill every receiver's link by itself (docs/transport.md). A peer
that complains of missing rows ends it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
from typing import Any

from tailbound.collective.speaker import Speaker
from tailbound.datapath.protocol import Datapath
from tailbound.errors import AttachError, CapabilityError
from tailbound.forks import keep_from_children
from tailbound.kernel.fanout import Fanout
from tailbound.transport.sender import Shared
from tailbound.transport.sockets import UdpSocket, room_of, sending_socket
from tailbound.transport.steps import step_of
from tailbound.wire.address import is_ipv6, words_of

#: Channels to open for what is asked for, the preferred one first.
_CHANNELS = {"peers": (), "fanout": ("fanout",), "auto": ("fanout",), "multicast": ("multicast", "fanout")}
#: Groups of an organisation's own (RFC 2365): one of 2 ** 18 by the job's cookie, unless one is given.
_GROUPS = ipaddress.IPv4Network("239.192.0.0/14")
#: Hops of multicast: within the organisation.
_TTL = 16
#: Bytes in flight that the socket of a group has room for.
_GROUP_ROOM = 512 << 10


class Channels:
    """The channels of one rank that reach all its peers at once: what there is, what is in use, and why.

    Args:
        job: of the rank.
        datapath: which packets come over, and over which interface.

    Attributes:
        wanted: what was asked for, one of ``config.AskedResult``.
        usable: destinations of the send queue that reach all, the preferred first; none: each peer by itself.
        live: peers that results are for.
        fanout: the program that clones bursts; None: there is none.
    """

    def __init__(self, job: Speaker, datapath: Datapath) -> None:
        self._job, self._datapath = job, datapath
        self.wanted = job.config.result
        self.usable: tuple[int, ...] = ()
        self.live: tuple[int, ...] = ()
        self.fanout: Fanout | None = None
        self._changes = 0  # of who takes part, that were followed
        self._why: list[str] = []  # what cannot be had, or is given up
        keep_from_children(self)

    @property
    def result(self) -> str:
        """How results leave."""
        usable = self.usable
        return self._job.sender.shared[usable[0]].name if usable else "peers"

    @property
    def reason(self) -> str:
        """Why they leave so."""
        return "; ".join(self._why) or ("this kernel clones bursts" if self.wanted == "auto" else "asked for")

    # -- opening them -------------------------------------------------------------------------------------------------

    def open(self, *, alone: bool) -> None:
        """Opens those that the job may use; called once, before its thread starts.

        Args:
            alone: no rank is on the udp datapath.
        """
        job, refused = self._job, ""
        if job.switch is not None:
            refused = "a switch sums and sends the results"
        elif job.ranks <= 2:
            refused = "there are no two peers that get the same"
        elif not alone or self._datapath.name == "udp":
            refused = "the udp datapath sends to each peer by itself"
        names = _CHANNELS[self.wanted]
        if refused and names:
            names, self._why = (), [refused]
        for name in names:
            try:
                with contextlib.ExitStack() as opened:
                    one = self._open_fanout(opened) if name == "fanout" else self._open_multicast(opened)
                    self.usable += (job.sender.share(one),)
                    opened.pop_all()
            except (CapabilityError, AttachError) as error:
                self._why.append(f"no {name}: {error}")
        self.follow()
        self._say()

    def _open_fanout(self, opened: contextlib.ExitStack) -> Shared:
        job, interface, (address, own_port) = self._job, self._datapath.interface, self._datapath.endpoint
        peers = {rank: job.sender.peers[rank] for rank in job.peers}
        to = {own_port, *(port for _, port in peers.values())}
        if len(to) > 1:
            raise CapabilityError(
                f"ranks receive at UDP ports {', '.join(map(str, sorted(to)))}, and copies go to one port: give all "
                "ranks the same (attach --port, TAILBOUND_PORT)"
            )
        sock = opened.enter_context(sending_socket(address, room_of(len(peers))))
        port = int(sock.getsockname()[1])
        try:
            fanout = Fanout.attach(interface, port, to.pop(), address=address)
        except CapabilityError as error:
            try:  # what ``tailbound attach`` has left for processes without privileges
                fanout = Fanout.open(interface, port, address=address)
            except (AttachError, CapabilityError):
                raise error from None
        opened.callback(fanout.close)
        fanout.set_peers(job.rank, {rank: host for rank, (host, _) in peers.items()})
        self.fanout = fanout
        return Shared("fanout", sock)

    def _open_multicast(self, opened: contextlib.ExitStack) -> Shared:
        job, (address, port) = self._job, self._datapath.endpoint
        if is_ipv6(address):
            raise CapabilityError(
                "groups are of IPv4, and this job talks over IPv6: use TAILBOUND_RESULT=fanout or peers"
            )
        group = str(_GROUPS[job.cookie % _GROUPS.num_addresses])
        sock = opened.enter_context(sending_socket(address, _GROUP_ROOM))
        own = socket.inet_aton(address)
        options: dict[int, int | bytes] = {  # to others alone; snooping switches (IGMP) deliver to members
            socket.IP_MULTICAST_IF: own,
            socket.IP_MULTICAST_TTL: _TTL,
            socket.IP_MULTICAST_LOOP: 0,
            socket.IP_ADD_MEMBERSHIP: socket.inet_aton(group) + own,
        }
        try:
            for option, value in options.items():
                sock.setsockopt(socket.IPPROTO_IP, option, value)
        except OSError as error:
            raise CapabilityError(
                f"{group} cannot be joined at {address} ({error.strerror}): use TAILBOUND_RESULT=fanout or peers"
            ) from error
        job.store.control["group"] = words_of(group).address
        return Shared("multicast", sock, (group, port), local=False)

    def close(self) -> None:
        """Detaches and leaves; may be called twice, when no rank sends any more."""
        fanout, self.fanout = self.fanout, None
        if fanout is not None:
            fanout.close()
        for sock in self._sockets:
            sock.close()

    @property
    def _sockets(self) -> list[UdpSocket]:
        return [channel.socket for channel in self._job.sender.shared.values()]

    def descriptors(self) -> list[int]:
        """See ``forks.Owner``."""
        return [sock.fileno() for sock in self._sockets if sock.fileno() >= 0]

    # -- using them ---------------------------------------------------------------------------------------------------

    def aims(self) -> tuple[int, ...]:
        """Destinations of results, for the send queue: one that reaches all, or each peer."""
        job, pacer = self._job, self._job.queue.pacer
        self.follow()
        if self.usable:
            channel = job.sender.shared[self.usable[0]]
            # a rank behind a slow link is sent to by itself: a burst to all is as slow as the slowest
            even = self.wanted == channel.name or pacer.even(channel.ranks)
            together = even and len(channel.ranks) >= 2 and not channel.broken
            if together:
                return self.usable[:1]
        return self.live

    def count(self, aims: int) -> None:
        """Counts results that have left for so many destinations."""
        if self.usable:
            self._job.counters["results_at_once" if aims == 1 else "results_apart"] += 1

    def follow(self) -> None:
        """Lets results go to who is there: not to who has said goodbye, nor to who is dead as far as one can tell.

        A rank that is only stopped is taken to be dead soon, but finds what its kernel has received when it goes on; so
        one that is dead gets results as long as there is room for them. No suspect leads a burst: it may have no host.
        """
        job, members, shared = self._job, self._job.membership, self._job.sender.shared
        suspects, changed = members.suspects, members.changes != self._changes
        if not (suspects or changed):  # asked for with every op
            return
        dead = members.dead(step_of(job.sequence.upcoming)) if suspects else ()
        live = tuple(peer for peer in members.here if peer not in dead or not job.beyond(peer))
        if live == self.live and not changed:
            return
        self.live, self._changes = live, members.changes
        if self.fanout is not None:
            self.fanout.live(live, suspects)
        for channel in shared.values():
            channel.ranks, channel.broken = live, False
            if channel.name == "fanout" and self.fanout is not None and self.fanout.lead is not None:
                channel.target = job.sender.peers[self.fanout.lead]
        job.queue.pacer.link.room = job.sender.room

    def complained(self, peer: int) -> bool:
        """Most of the own rows do not come to ``peer``, op after op; returns whether multicast is given up for that."""
        if self.result != "multicast":
            return False
        self.usable = self.usable[1:]
        self._why.append(f"multicast does not reach {peer}, and is given up")
        self._say()
        return True

    def _say(self) -> None:
        wanted = self.wanted in ("auto", self.result)
        self._job.events.emit(
            "results_by",
            f"results leave by {self.result}: {self.reason}",
            level=logging.INFO if wanted else logging.WARNING,
            result=self.result,
            reason=self.reason,
        )
        self._job.counters["result_fallbacks"] += not wanted

    def snapshot(self) -> dict[str, Any]:
        """What is done and why, and what left over every channel, in plain types."""
        shared = {one.name: one for one in self._job.sender.shared.values()}
        clones = fanout.counts() if (fanout := self.fanout) is not None else {}
        return {
            "result": self.result,
            "reason": self.reason,
            "wanted": self.wanted,
            "live": list(self.live),
            "group": shared["multicast"].target[0] if "multicast" in shared else None,
            "channels": {name: {**one.counts.snapshot(), "waits": one.counts.waits} for name, one in shared.items()},
            "clones_failed": {str(rank): n.packets_failed for rank, n in clones.items() if n.packets_failed},
        }
