"""Who takes part: ranks exchange a greeting over PyTorch's store, once, before the first packet.

The store is only used here and at the end; the data path has no barrier, and TCP for lost results only (``reliable``).
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

from tailbound import errors
from tailbound.codec.shape import CODEC_NUMBER
from tailbound.errors import LayoutError, TailboundError, TransportError
from tailbound.wire.address import endpoint, is_ipv6, is_loopback
from tailbound.wire.schema import HELLO_NUMBER, VERSION

log = logging.getLogger("tailbound")

#: Seconds after which the ranks that have not greeted yet are named, and between two looks until then.
_NAMED, _POLL = 5.0, 0.05
#: Fields that must be equal on all ranks, with what to do when they are not.
_EQUAL = {
    "ranks": "start all ranks with the same world size",
    "width": "a row is as wide as the MTU lets it be, and the MTUs differ (`ip link`, or --mtu of `tailbound attach`); "
    "give every worker's interface the same MTU, or pass the smallest as mtu= on every rank",
    "model": "load a checkpoint on every rank before register, and train the same model (parameter shapes, order and "
    "types) with the same scaler",
    "switch": "name the same switch, with the same slots and form, on every rank",
}


#: Gets a rank and its greeting as a mapping, and raises a LayoutError where that is not this rank's.
Verify: TypeAlias = "Callable[[int, Mapping[str, Any]], None]"


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used here."""

    def set(self, key: str, value: Any) -> None:
        """Sets a key."""

    def get(self, key: str) -> bytes:
        """Waits for a key and returns it."""

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Waits for keys."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of ``keys`` are set."""


@dataclass(frozen=True)
class Greeting:
    """What a rank says of itself.

    ``rows`` and ``sum_rows`` are its rings, ``options`` those that must be equal on all ranks, by name and in words,
    ``cookie`` counts on rank 0 only, ``reliable`` is a TCP port. ``formats`` are those of packets, codes and tries,
    which versions may change one by one. ``nonce`` was never said before, and
    ``proof`` shows that who says all this has the job's key (``keys.prove``); both are empty in a job without one.
    """

    rank: int
    ranks: int
    version: str
    address: str
    port: int
    width: int
    rows: int
    sum_rows: int
    datapath: str
    model: str
    options: Mapping[str, str]
    cookie: int = 0
    reliable: int = 0
    switch: str = ""
    formats: str = f"wire {VERSION}, codec {CODEC_NUMBER}, hello {HELLO_NUMBER}"
    nonce: str = ""
    proof: str = ""


def host_of(store: Store) -> str:
    """The host that a store over TCP is at, in ``torch.distributed``'s terms; empty where it has none."""
    inner: Any = store
    while hasattr(inner, "underlying_store"):  # a PrefixStore
        inner = inner.underlying_store
    host = getattr(inner, "host", "")
    return host if isinstance(host, str) else ""


def new_cookie() -> int:
    """A job's cookie: 32 random bits, never 0 (empty records have cookie 0)."""
    return secrets.randbelow(0xFFFFFFFF) + 1


def exchange(store: Store, own: Greeting, prefix: str, timeout: float, verify: Verify | None = None) -> list[Greeting]:
    """Sets the own greeting and returns all of them by rank, checked.

    Raises:
        TransportError: a rank did not show up within ``timeout`` seconds.
        LayoutError: two ranks say different things of something that must be equal.
    """
    store.set(f"{prefix}/greeting/{own.rank}", json.dumps(asdict(own)))
    keys = [f"{prefix}/greeting/{rank}" for rank in range(own.ranks)]
    _name_missing(store, keys, own, timeout)
    greetings = []
    for rank, key in enumerate(keys):
        greetings.append(_parse(own, rank, wait_for(store, key, rank, timeout, "greet"), verify))
        if rank == own.rank and greetings[-1] != own:
            raise LayoutError(
                f"two processes say they are rank {rank}: {endpoint(own.address, own.port)} and "
                f"{endpoint(greetings[-1].address, greetings[-1].port)}; give every process a rank of its own"
            )
    check(greetings)
    return greetings


def begin(store: Store, prefix: str) -> None:
    """All ranks have met: from now on a rank that dies may come back (``under_way``)."""
    store.set(f"{prefix}/begun", "1")


def under_way(store: Store, rank: int, ranks: int, prefix: str) -> list[str] | None:
    """The greetings of a job that has begun already, as text by rank; None if it has not.

    Raises:
        TransportError: ``rank`` has been here before, and the job has not begun.
    """
    if store.check([f"{prefix}/begun"]):
        return [store.get(f"{prefix}/greeting/{other}").decode() for other in range(ranks)]
    if store.check([f"{prefix}/greeting/{rank}"]):
        raise TransportError(
            f"rank {rank} has ended before its job had begun, and the others wait for it: restart all ranks, with "
            "another store"
        )
    return None


def come_back(own: Greeting, texts: list[str], verify: Verify | None = None) -> list[Greeting]:
    """Takes the place of the process before in a job under way, whose greetings are ``texts``.

    Raises:
        LayoutError: another rank says something else that must be equal, or this rank was elsewhere before.
    """
    greetings = [_parse(own, rank, text.encode(), verify) for rank, text in enumerate(texts)]
    before = greetings[own.rank]
    for name in ("address", "port", "reliable", "rows", "sum_rows", "datapath"):
        mine, was = getattr(own, name), getattr(before, name)
        if mine != was:
            raise LayoutError(
                f"rank {own.rank} comes back with {name} {mine!r} and had {was!r}: start it on the same host, with the "
                "same interface, port and ring"
            )
    return greetings


def _parse(own: Greeting, rank: int, text: bytes, verify: Verify | None) -> Greeting:
    """A greeting with all that must be equal; another version may have other fields, another program anything."""
    usual = asdict(own)
    said: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        said = json.loads(text)
    if isinstance(said, dict) and (said.get("formats") != own.formats or said.keys() != usual.keys()):
        raise LayoutError(
            f"rank {own.rank} runs tailbound {own.version} ({own.formats}), rank {rank} runs {said.get('version')} "
            f"({said.get('formats')}): install the same version of tailbound on every host"
        )
    fits = isinstance(said, dict) and all(type(said[name]) is type(value) for name, value in usual.items())
    if not fits or said["rank"] != rank or not all(isinstance(value, str) for value in said["options"].values()):
        raise LayoutError(
            f"what the store has as the greeting of rank {rank} is none: {text[:40]!r}; another program writes to "
            "it, use another store"
        )
    found = Greeting(**said)  # compared at once: with another world size the next one might never come
    for name, advice in _EQUAL.items():
        mine, theirs = getattr(own, name), getattr(found, name)
        if mine != theirs:
            raise LayoutError(f"rank {own.rank} has {name} {mine!r}, rank {rank} has {theirs!r}: {advice}")
    for name in {**own.options, **found.options}:  # in their order: what follows from another one comes after it
        mine, theirs = own.options.get(name, "none"), found.options.get(name, "none")
        if mine != theirs:
            raise LayoutError(
                f"rank {own.rank} has {name}={mine}, rank {rank} has {name}={theirs}: give every rank the same "
                f"(the option {name}, or the variable TAILBOUND_{name.upper()})"
            )
    if verify is not None:
        verify(rank, said)
    return found


def check(greetings: list[Greeting]) -> None:
    """Compares what must differ on all ranks, and what addresses they have.

    Raises:
        LayoutError: naming both ranks, both values and what to do.
    """
    families = {is_ipv6(other.address): other for other in greetings}
    if len(families) == 2:
        old, new = families[False], families[True]
        raise LayoutError(
            f"rank {old.rank} is at {old.address} and rank {new.rank} at {new.address}: all ranks of a job talk over "
            "IPv4, or all over IPv6; give MASTER_ADDR an address of the family that is meant, and the interfaces of "
            "all ranks one, too (with xdp: `tailbound attach` with or without --ipv6 on every host)"
        )
    local = {is_loopback(other.address): other for other in greetings}
    if len(local) == 2:
        raise LayoutError(
            f"rank {local[True].rank} is at {local[True].address} and rank {local[False].rank} at "
            f"{local[False].address}: a loopback address is of no use to other hosts; set TAILBOUND_INTERFACE (or pass "
            f"interface=) on rank {local[True].rank}"
        )
    seen: dict[str, Greeting] = {}
    for other in greetings:
        twin = seen.setdefault(other.address, other)
        if twin is not other and (twin.port == other.port or "xdp" in (twin.datapath, other.datapath)):
            raise LayoutError(
                f"ranks {twin.rank} and {other.rank} are {endpoint(twin.address, twin.port)} ({twin.datapath}) and "
                f"{endpoint(other.address, other.port)} ({other.datapath}), and packets between ranks of one address "
                "pass no interface: the xdp datapath takes one rank per interface; use datapath='udp' "
                "(TAILBOUND_DATAPATH=udp) for several ranks on a host"
            )


#: What ranks share before the first op, and what one has not done that is missed there.
_POINTS = {"active": "open its sockets and maps", "heard": "say whom it hears"}


def share(store: Store, name: str, text: str, rank: int, ranks: int, prefix: str, timeout: float) -> list[str]:
    """Waits until every rank has come to the same point (at start and at the end only), and brought something.

    Returns:
        What each rank has brought, by rank; this one brings ``text``.

    Raises:
        TransportError: a rank did not come within ``timeout`` seconds.
    """
    store.set(f"{prefix}/{name}/{rank}", text)
    what = _POINTS.get(name, f"come to the meeting {name!r}")
    return [wait_for(store, f"{prefix}/{name}/{other}", other, timeout, what).decode() for other in range(ranks)]


def wait_for(store: Store, key: str, rank: int, timeout: float, what: str) -> bytes:
    """What ``rank`` sets ``key`` to.

    Raises:
        TailboundError: of the kind that ``rank`` had, which cannot take part and has told so.
        TransportError: nothing came within ``timeout`` seconds.
    """
    try:
        store.wait([key], timedelta(seconds=max(0.001, timeout)))  # 0 would be for ever
    except Exception as error:
        raise TransportError(
            f"rank {rank} did not {what} within {timeout:g} s: start it, with the same world size"
        ) from error
    text = store.get(key)
    kind = why = None
    if text.startswith(_FAILED.encode()):
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            kind, why = json.loads(text.decode().removeprefix(_FAILED))
    if isinstance(why, str):
        raise (getattr(errors, kind) if kind in errors.__all__ else TransportError)(why)
    return text


def _name_missing(store: Store, keys: list[str], own: Greeting, timeout: float) -> None:
    """Waits a while for all to greet, and then the log of the first rank that is there names those that are not."""
    until = time.monotonic() + min(timeout, _NAMED)
    while not store.check(keys):
        if time.monotonic() >= until:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            first = min(set(range(own.ranks)).difference(missing))
            log.log(
                logging.WARNING if own.rank == first else logging.INFO,
                "rank %d waits for %s of %d: every rank of the group has to call register; timeout=%g seconds",
                own.rank, spoken(missing), own.ranks, timeout,
            )  # fmt: skip
            return
        time.sleep(_POLL)  # ``wait`` of a TCPStore writes lines of its own when it times out


#: With this begins what a rank that cannot take part leaves in the place of what others wait for.
_FAILED, _LACKS = "failed: ", " cannot take part: "


def tell_failed(store: Store, prefix: str, rank: int, error: BaseException) -> None:
    """This rank cannot take part: whoever waits for it, or will, ends with the same ``error`` (``wait_for``)."""
    why = str(error) if isinstance(error, TailboundError) else f"{type(error).__name__}: {error}"
    if _LACKS not in why:  # else it passes on what another one has said
        why = f"rank {rank}{_LACKS}{why}"
    text = _FAILED + json.dumps([type(error).__name__, why])
    names = [f"{name}/{rank}" for name in ("greeting", *_POINTS)] + ["key"] * (rank == 0)
    with contextlib.suppress(Exception):  # the store may be what has failed
        for key in (f"{prefix}/{name}" for name in names):
            if not store.check([key]):
                store.set(key, text)


def spoken(ranks: Sequence[int]) -> str:
    """``ranks``, rising, in words: ``rank 3``, ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return f"rank{'s' * (len(ranks) != 1)} " + ", ".join("-".join(map(str, run)) for run in runs)


def datapaths(greetings: Sequence[Greeting]) -> str:
    """Which ranks have which datapath, in words."""
    return "; ".join(
        f"{name} on {spoken([g.rank for g in greetings if g.datapath == name])}"
        for name in sorted({g.datapath for g in greetings}, reverse=True)
    )
