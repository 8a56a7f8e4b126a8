"""Which ranks are on one host, agreed on by all ranks before the first step."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from tailbound.errors import ConfigError
from tailbound.settings.table import NODE_GROUP
from tailbound.transport import rendezvous

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

    def group(self, *, of_peers: bool) -> dist.ProcessGroup:
        """A new Gloo group of this host's ranks, or of this rank's peers; to be called on all ranks of all hosts."""
        own = self.members[self.place]
        places = zip(*self.hosts, strict=True)
        # names of groups that only their members make are drawn from how many each of these has made: they may differ
        everybody = sum(map(len, self.hosts)) == dist.get_world_size()
        found: dist.ProcessGroup | None = None
        for ranks in places if of_peers else self.hosts:
            if everybody or own in ranks:
                made = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=not everybody)
                found = made if own in ranks else found
        assert found is not None
        return found


def find(group: dist.ProcessGroup, asked: dist.ProcessGroup | str | None, timeout: float) -> Node | None:
    """The host of this rank, or None where every rank is to stand for itself.

    To be called on all ranks of ``group``. Every rank says which ranks it takes for its host's, and all must agree.

    Args:
        group: of the model.
        asked: the ranks of this host, as a group; ``auto``: those that torchrun has started here; ``off``: no host;
            None: what ``TAILBOUND_NODE_GROUP`` says.
        timeout: seconds to wait for the others.

    Raises:
        ConfigError: ranks differ, hosts have different numbers of ranks, or it is no group of this rank.
        TransportError: a rank did not come.
    """
    ranks = dist.get_process_group_ranks(group)
    asked = NODE_GROUP.read() if asked is None else asked
    if isinstance(asked, str):
        asked = NODE_GROUP.parse(asked, "node_group=")
    members = _members(ranks, asked)
    prefix = f"tailbound/{group.group_name}/{'-'.join(map(str, ranks))}/{_registered[group.group_name]}"
    _registered[group.group_name] += 1
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank(group)
    text = json.dumps([socket.gethostname(), members])
    if members is None:
        store.set(f"{prefix}/hosts/{rank}", text)  # for those who have asked for hosts: they name this rank
        return None
    said = [json.loads(words) for words in rendezvous.share(store, "hosts", text, rank, len(ranks), prefix, timeout)]
    hosts = agreed(ranks, said)
    if len(members) == 1:
        return None
    return Node(tuple(hosts), tuple(members), members.index(dist.get_rank()))


def agreed(ranks: Sequence[int], said: Sequence[tuple[str, list[int] | None]]) -> list[tuple[int, ...]]:
    """The hosts that ``ranks`` are on, in the order of their lowest ranks.

    Args:
        ranks: of the model's group.
        said: what each of them says: the name of its machine, and which ranks it takes for its host's.

    Raises:
        ConfigError: they do not fit together; the message names the ranks and their machines.
    """
    names = {rank: name for rank, (name, _) in zip(ranks, said, strict=True)}
    hosts: dict[int, tuple[int, ...]] = {}
    for rank, (name, members) in zip(ranks, said, strict=True):
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
                "bucket into as many shards as it has ranks, so start as many on each host, or leave out node_group"
            )
    return found


def _members(ranks: Sequence[int], asked: dist.ProcessGroup | str) -> list[int] | None:
    """The ranks of ``ranks`` on this host; None: the caller wants none."""
    own = dist.get_rank()
    if not isinstance(asked, str):
        members = sorted(dist.get_process_group_ranks(asked)) if isinstance(asked, dist.ProcessGroup) else []
        if own not in members:  # torch gives no group to those who are not in it
            raise ConfigError(f"node_group= is a group, and this rank, {own}, is not in it: give the ranks of its host")
        return members
    if asked == "off":
        return None
    try:
        here, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise ConfigError(
            "node_group='auto' goes by LOCAL_RANK and LOCAL_WORLD_SIZE, and they are not set: start with torchrun, or "
            "give the group of this host's ranks"
        ) from error
    first = own - here
    return [rank for rank in ranks if first <= rank < first + size]


def _words(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
