"""Which ranks are on one host, agreed on by all ranks before the first step."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from tailbound.errors import ConfigError, TransportError
from tailbound.settings.table import NODE_GROUP
from tailbound.torch.interfaces import local_place
from tailbound.transport import rendezvous

log = logging.getLogger("tailbound")

#: Models registered so far by members of a group: all of them agree on the number.
_registered: Counter[str] = Counter()


@dataclass(frozen=True)
class Node:
    """One host among several of as many ranks; ranks are those of the default group.

    Attributes:
        hosts: the ranks of every host.
        members: ranks of this host.
        place: of this rank on its host.
    """

    hosts: tuple[tuple[int, ...], ...]
    members: tuple[int, ...]
    place: int

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks at the same place on all hosts, in the order of hosts."""
        return tuple(host[self.place] for host in self.hosts)

    @property
    def everybody(self) -> bool:
        """Whether all ranks of the default group are on these hosts."""
        return sum(map(len, self.hosts)) == dist.get_world_size()

    def group(self, *, of_peers: bool, timeout: float, backend: str = "gloo") -> dist.ProcessGroup:
        """A new group of this host's ranks, or of this rank's peers; to be called on all ranks of all hosts.

        Args:
            of_peers: which of both.
            timeout: seconds to wait for the others, now and in each of its collectives.
            backend: of the group.

        Raises:
            TransportError: a rank did not come.
        """
        own = self.members[self.place]
        places = zip(*self.hosts, strict=True)
        # Where it can be, every rank makes all groups, also those that it is not in: then torch numbers them. A group
        # that only its members make is named by how many groups a rank has, and they may have different numbers.
        everybody = self.everybody
        found: dist.ProcessGroup | None = None
        for ranks in places if of_peers else self.hosts:
            if everybody or own in ranks:
                try:
                    made = dist.new_group(
                        list(ranks),
                        timedelta(seconds=timeout),
                        backend=backend,
                        use_local_synchronization=not everybody,
                    )
                except RuntimeError as error:
                    raise TransportError(
                        f"rank {own}: no {backend} group of {_words(ranks)} within {timeout:g} s: {error}. Look "
                        "at the logs of these ranks: one of them may have ended"
                    ) from error
                found = made if own in ranks else found
        assert found is not None
        return found

    def end(self, group: dist.ProcessGroup) -> None:
        """Ends what ``group`` has returned.

        Not where only its members have made it: torch would give its name again, and the store keeps the addresses of
        the old one under it. Such a group ends with ``destroy_process_group()``.
        """
        if dist.is_initialized() and self.everybody:  # everybody asks the default group
            with contextlib.suppress(ValueError):  # ended already, by the default group's end
                dist.destroy_process_group(group)


def find(
    group: dist.ProcessGroup,
    asked: dist.ProcessGroup | str | None,
    timeout: float,
    check: Callable[[int, int], object] = lambda *_: None,
) -> Node | None:
    """The host of this rank, or None where every rank is to stand for itself.

    To be called on all ranks of ``group``. Every rank says which ranks it takes for its host's, or why it cannot take
    part, and all must agree: what one of them refuses is refused on all.

    Args:
        group: of the model.
        asked: the ranks of this host, as a group; ``auto``: those that torchrun has started here; ``off``: no host;
            None: what ``TAILBOUND_NODE_GROUP`` says.
        timeout: seconds to wait for the others.
        check: gets this rank's place and the number of ranks on a host of several; raises a ``ConfigError`` if it
            cannot be one of them.

    Raises:
        ConfigError: ranks differ, hosts have different numbers of ranks, it is no group of this rank, or a rank's
            ``check`` has refused.
        TransportError: a rank did not come.
    """
    ranks = dist.get_process_group_ranks(group)
    prefix = f"tailbound/{group.group_name}/{'-'.join(map(str, ranks))}/{_registered[group.group_name]}"
    _registered[group.group_name] += 1  # first of all: whoever is refused has the number of the others next time
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank(group)
    members: list[int] | None = None
    refusal: ConfigError | None = None
    try:
        members = _members(ranks, asked)
        if members is not None and len(members) > 1:
            check(members.index(dist.get_rank()), len(members))
    except ConfigError as error:
        refusal = error
    text = json.dumps([socket.gethostname(), members, str(refusal or "")])
    if members is None and refusal is None:
        store.set(f"{prefix}/hosts/{rank}", text)  # for those who have asked for hosts: they name this rank
        if rank == 0 and asked is None:
            _tell_what_could_be(len(ranks))
        return None
    try:
        shared = rendezvous.share(store, "hosts", text, rank, len(ranks), prefix, timeout)
    except TransportError:
        if refusal is not None:
            raise refusal from None
        raise
    if refusal is not None:
        raise refusal
    hosts = agreed(ranks, [json.loads(words) for words in shared])
    if members is None or len(members) == 1:
        return None
    return Node(tuple(hosts), tuple(members), members.index(dist.get_rank()))


def agreed(ranks: Sequence[int], said: Sequence[tuple[str, list[int] | None, str]]) -> list[tuple[int, ...]]:
    """The hosts that ``ranks`` are on, in the order of their lowest ranks.

    Args:
        ranks: of the model's group.
        said: what each of them says: the name of its machine, which ranks it takes for its host's, and why it cannot
            take part (empty: it can).

    Raises:
        ConfigError: they do not fit together; the message names the ranks and their machines.
    """
    names = {rank: name for rank, (name, _, _) in zip(ranks, said, strict=True)}
    for rank, (name, _, refusal) in zip(ranks, said, strict=True):
        if refusal:
            raise ConfigError(f"rank {rank} on {name} has refused: {refusal}; look at the options that it was given")
    hosts: dict[int, tuple[int, ...]] = {}
    for rank, (name, members, _) in zip(ranks, said, strict=True):
        if members is None:
            raise ConfigError(
                f"rank {rank} on {name} has no node_group, and others have: pass the same node_group= to register, or "
                f"set {NODE_GROUP.variable}, on every rank"
            )
        hosts[rank] = tuple(members)
    for rank, host in hosts.items():
        for other in host:
            if hosts.get(other) != host:
                theirs = f"takes its host for {_words(hosts[other])}" if other in hosts else "does not train this model"
                raise ConfigError(
                    f"rank {rank} on {names[rank]} has {_words(host)} for its host, and rank {other} {theirs}: give "
                    "every rank the group of all ranks on its own host"
                )
    found = sorted(set(hosts.values()))
    first = found[0]
    for host in found:
        if len(host) != len(first):
            raise ConfigError(
                f"{names[first[0]]} has {_words(first)}, and {names[host[0]]} has {_words(host)}: every host cuts a "
                "bucket into as many shards as it has ranks, so start as many on each host, or pass node_group='off'"
            )
    return found


def _tell_what_could_be(ranks: int) -> None:
    """Where torchrun has started several of ``ranks`` on each of several hosts, and nobody says anything of hosts."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not os.environ.get(NODE_GROUP.variable, "").strip() and here.isdecimal() and 1 < int(here) < ranks:
        log.info(
            'torchrun has started %s of %d ranks here, and each stands for itself: with node_group="auto" those of a '
            "host send a part of the bytes each, and wait for each other (docs/torch/nodes.md)",
            here,
            ranks,
        )


def _members(ranks: Sequence[int], asked: dist.ProcessGroup | str | None) -> list[int] | None:
    """The ranks of ``ranks`` on this host; None: the caller wants none."""
    own = dist.get_rank()
    asked = NODE_GROUP.read() if asked is None else asked
    if isinstance(asked, str):
        asked = NODE_GROUP.parse(asked, "node_group=")
    if not isinstance(asked, str):
        members = sorted(dist.get_process_group_ranks(asked)) if isinstance(asked, dist.ProcessGroup) else []
        if own not in members:  # torch gives no group to those who are not in it
            raise ConfigError(f"node_group= is a group, and this rank, {own}, is not in it: give the ranks of its host")
        return members
    if asked == "off":
        return None
    here, size = local_place("node_group='auto'", "give the group of this host's ranks")
    first = own - here
    return [rank for rank in ranks if first <= rank < first + size]


def _words(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
