"""The ranks of one host: what interface each takes, how all ranks agree on them, and how they tell of a hold."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tailbound.errors import ConfigError, TransportError
from tailbound.settings.table import NODE_GROUP, known
from tailbound.torch.compat import default_store
from tailbound.transport import rendezvous

log = logging.getLogger("tailbound")

#: Seconds for a datagram to a neighbour: its thread does nothing else than read them.
_PATIENCE = 1.0
#: Models registered so far over the default group; all ranks agree on the number.
_registered = itertools.count()


@dataclass(frozen=True)
class Node:
    """This rank's ``place`` on its host, and the number of ``places`` there; every host has as many."""

    place: int
    places: int

    @property
    def members(self) -> range:
        """Ranks of this host in the default group."""
        first = dist.get_rank() - self.place
        return range(first, first + self.places)

    def group(self, *, of_peers: bool, timeout: float, backend: str = "gloo") -> dist.ProcessGroup:
        """A new group of this host's ranks, or (``of_peers``) of the ranks at this place; to be called on all ranks."""
        world = list(range(dist.get_world_size()))
        hosts = [world[first : first + self.places] for first in world[:: self.places]]
        found: dist.ProcessGroup | None = None
        for ranks in zip(*hosts, strict=True) if of_peers else hosts:
            try:
                made = dist.new_group(list(ranks), timedelta(seconds=timeout), backend=backend)
            except RuntimeError as error:
                raise TransportError(
                    f"rank {dist.get_rank()}: no {backend} group of ranks {', '.join(map(str, ranks))} within "
                    f"{timeout:g} s: {error}. Look at the logs of these ranks: one of them may have ended"
                ) from error
            found = made if dist.get_rank() in ranks else found
        assert found is not None
        return found


def find(
    group: dist.ProcessGroup, asked: str | None, timeout: float, check: Callable[[int, int], object] = lambda *_: None
) -> Node | None:
    """The host of this rank, or None where every rank is to stand for itself.

    To be called on all ranks. A refusal on one of them is a refusal on all.

    Args:
        group: of the model.
        asked: ``node_group`` of ``register``.
        timeout: seconds to wait for the others.
        check: gets this rank's place and the number of ranks on a host of several; raises a ``ConfigError`` if it
            cannot be one of them.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    place, places = 0, 0
    refusal: ConfigError | None = None
    if ranks < dist.get_world_size():
        if (NODE_GROUP.read() if asked is None else asked) == "off":
            return None
        raise ConfigError(f'this model is of {ranks} ranks, and node_group takes those of all: give node_group="off"')
    try:
        wanted = NODE_GROUP.read() if asked is None else NODE_GROUP.parse(str(asked), "node_group=")
        if wanted == "auto":
            place, places = local_place("node_group='auto'", "leave it out")
            if places > 1:
                check(place, places)
    except ConfigError as error:
        refusal = error
    prefix, store = f"tailbound/hosts/{next(_registered)}", default_store()
    text = json.dumps([socket.gethostname(), place, places, str(refusal or "")])
    if not (places or refusal):
        store.set(f"{prefix}/hosts/{rank}", text)  # for those who have asked for hosts: they name this rank
        return None
    try:
        shared = rendezvous.share(store, "hosts", text, rank, ranks, prefix, timeout)
    except TransportError:
        if refusal is None:
            raise
    if refusal is not None:
        raise refusal
    agree([json.loads(words) for words in shared])
    return Node(place, places) if places > 1 else None


def agree(said: Sequence[tuple[str, int, int, str]]) -> None:
    """Refuses hosts that do not fit together, by a ``ConfigError`` with the ranks and their machines.

    ``said``: by rank the name of its machine, its place there, the number of places (0: it has no node_group), and why
    it cannot take part (empty: it can).
    """
    for rank, (name, _, _, refusal) in enumerate(said):
        if refusal:
            raise ConfigError(f"rank {rank} on {name} has refused: {refusal}; look at the options that it was given")
    first, _, expected, _ = said[0]
    odd = [
        rank
        for rank, (_, place, places, _) in enumerate(said)
        if not places or places != expected or place != rank % places
    ]
    if odd or len(said) % expected:
        rank = odd[0] if odd else len(said) - 1
        name, place, places, _ = said[rank]
        raise ConfigError(
            f"of {len(said)} ranks rank 0 on {first} is one of {expected} with a node_group there, and rank {rank} "
            f"on {name} is LOCAL_RANK={place} of {places}: start as many ranks on each host, numbered in a row as "
            f"by torchrun, and pass all of them one node_group= (or {NODE_GROUP.variable}), or node_group='off'"
        )


class Holds:
    """This rank's hold and those of its neighbours, as one (clock-16).

    A rank that evaluates alone keeps its neighbours waiting, so their jobs hold, too. They wait in a collective, and
    are told over datagram sockets. Ranks in containers of their own do not find each other: they are not told.

    ``name``: of this host's job alone. ``changed``: called, by whatever thread, with whether one of the ranks holds,
    where that is not what it was.
    """

    def __init__(self, name: str, place: int, places: int, changed: Callable[[bool], None]) -> None:
        self._place, self._changed = place, changed
        self._addresses = [f"\0{name}/{other}" for other in range(places)]
        self._holding, self._lock, self._told = set[int](), threading.Lock(), False
        self._socket, self._closed = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), False
        self._socket.bind(self._addresses[place])
        self._thread = threading.Thread(target=self._hear, name="tailbound-hold", daemon=True)
        self._thread.start()

    def set(self, on: bool) -> None:
        """This rank holds, or no longer."""
        self._note(self._place, on)
        for other, address in enumerate(self._addresses):
            if other != self._place:
                with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
                    out.settimeout(_PATIENCE)
                    out.sendto(bytes([self._place, on]), address)

    def close(self) -> None:
        """Ends the thread."""
        self._closed = True
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes it
        self._thread.join(_PATIENCE)
        self._socket.close()

    def _hear(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                words = self._socket.recv(3)
                if self._closed:
                    return
                # any process of the machine can send here
                if len(words) == 2 and words[0] != self._place and words[0] < len(self._addresses) and words[1] <= 1:
                    self._note(words[0], bool(words[1]))

    def _note(self, place: int, on: bool) -> None:
        with self._lock:
            (self._holding.add if on else self._holding.discard)(place)
            if bool(self._holding) != self._told:
                self._told = not self._told
                self._changed(self._told)


def local_place(what: str, otherwise: str) -> tuple[int, int]:
    """This rank's place on its host and the number of ranks there, as torchrun says them; else ``what`` is refused."""
    try:
        return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{what} goes by LOCAL_RANK and LOCAL_WORLD_SIZE, and they are not set: start with torchrun, set both, or "
            f"{otherwise}"
        ) from error


def own_interface(given: str | None, datapath: str) -> tuple[str | None, str]:
    """Interface and datapath of this rank; of several names with commas between them, the one at LOCAL_RANK."""
    if given is None or "," not in given:
        return given, datapath
    what = f"interface={given}: the first name is for local rank 0, and so on; this"
    place, places = local_place(what, "give each rank the name of its own interface")
    return interface_for(given, place, places, datapath)


def of_place(options: Mapping[str, Any], place: int, places: int, jobs: int, what: str) -> dict[str, Any]:
    """Interface and datapath of the rank at ``place`` of ``places``; ``jobs``: as many as there are ``what``."""
    datapath = known("datapath", options)
    if jobs > 1 and known("switch", options):
        raise ConfigError(f"a switch serves one job, and {jobs} {what} are {jobs} jobs: give no switch")
    interface, datapath = interface_for(known("interface", options), place, places, datapath)
    return {"interface": interface, "datapath": datapath}


def interface_for(given: str | None, place: int, places: int, datapath: str) -> tuple[str | None, str]:
    """Interface and datapath of the rank at ``place``, of ``places`` ranks on a host with a job each.

    ``given``: one interface for all, one for each with commas between them, or None; ``datapath``: as was asked for.
    """
    names = [name.strip() for name in (given or "").split(",")]
    if len(names) > 1:
        if len(names) < places or len(set(names)) < len(names):
            raise ConfigError(f"interface={given}: give another one to each of the {places} ranks on a host")
        return names[place], datapath
    if places == 1 or datapath == "udp":
        return given, datapath
    if datapath != "auto":
        raise ConfigError(
            f"{places} ranks on a host are as many jobs, and {datapath} takes one job an interface: pass interface= "
            f"with {places} names, or datapath='udp'"
        )
    log.info("several ranks share %s: udp, since xdp takes one job an interface", given or "an interface")
    return given, "udp"
