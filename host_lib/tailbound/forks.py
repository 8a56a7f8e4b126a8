"""What a forked child must not keep of a job: data loader workers, say, live on when their trainer is killed.

A child that kept the sockets would keep their ports, so that a restart finds them taken; one that kept a BPF link would
keep a program without a trainer on the interface. In a child every such descriptor becomes ``/dev/null``: its number
stays in use, so that whoever closes or writes it there does no harm.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Protocol
from weakref import WeakSet


class Owner(Protocol):
    """Who has descriptors that are of this process alone."""

    def descriptors(self) -> Iterable[int]:
        """Those that are open now."""


_owners: WeakSet[Owner] = WeakSet()


def keep_from_children(owner: Owner) -> None:
    """From now on, children of this process get none of ``owner.descriptors()``, as long as ``owner`` lives."""
    _owners.add(owner)


def _in_child() -> None:
    owners = list(_owners)
    _owners.clear()
    if not owners:
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for owner in owners:
        for fd in owner.descriptors():
            with contextlib.suppress(OSError):
                os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_in_child)
