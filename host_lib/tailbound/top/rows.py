"""From statuses of ranks to what is shown: rates out of two readings, totals out of peers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: Seconds after which a status that was not replaced says that its process is stopped.
SILENT_AFTER = 2.0
#: Characters of a text in a status that are shown.
_LONGEST = 40


@dataclass(frozen=True)
class Row:
    """One rank, in plain types; times in ms, rates per second.

    ``answer_ms`` is what the slowest of the last answers of others took, ``woke_late_ms`` how late the own thread wakes
    up, ``lack_ms`` what it waited for a core in one of the last ops at most (all three are what ranks wait for a core),
    ``waited_ms`` what ops have waited past their deadlines in all.

    ``None``: ``ops_per_s`` and ``sent_mbit_s`` need a second reading; ``rate_mbit_s`` (that of the slowest paced peer)
    where nobody is paced; ``rtt_us`` (the longest) where there is none yet.
    """

    job: str
    rank: int
    ranks: int
    pid: int
    state: str
    op: str
    ops: int
    ops_per_s: float | None
    p50_ms: float
    p99_ms: float
    d1_ms: float
    d2_ms: float
    q_ms: float
    answer_ms: float
    woke_late_ms: float
    lack_ms: float
    waited_ms: float
    sent_mbit_s: float | None
    rate_mbit_s: float | None
    rtt_us: float | None
    incast: int
    map_id: int
    owns: bool
    rotate: bool
    delivered: float
    late: int
    lost: int
    refused: int
    absent: int
    repaired: int
    drops: int
    late_ranks: tuple[int, ...]
    losing_ranks: tuple[int, ...]
    suspects: tuple[str, ...]
    datapath: str
    event: str

    def as_dict(self) -> dict[str, Any]:
        """Plain types."""
        return asdict(self)


def row_of(status: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> Row:
    """One rank's row; ``before`` is an earlier status of the same rank, for rates.

    Raises:
        KeyError, TypeError, ValueError: this is no status of our kind (another version's, say).
    """
    peers: Mapping[str, Mapping[str, Any]] = status["peers"]
    seconds = float(status["monotonic"]) - float(before["monotonic"]) if before else 0.0
    rate = sent = None
    if before is not None and seconds > 0:
        rate = (int(status["ops"]) - int(before["ops"])) / seconds
        sent = (int(status["sent_bytes"]) - int(before["sent_bytes"])) * 8 / seconds / 1e6
    rtts = [float(p["rtt_us"]) for p in peers.values() if p["rtt_us"]]
    rates = [float(p["rate_mbit_s"]) for p in peers.values() if p["rate_mbit_s"]]
    deadlines, overtime, owner_map = status["deadlines_ms"], status["overtime_ms"], status["map"]
    events = status["events"]
    return Row(
        job=_words(status["cookie"]),
        rank=int(status["rank"]),
        ranks=int(status["ranks"]),
        pid=int(status["pid"]),
        state=_state(status),
        op=_words(status["op"]),
        ops=int(status["ops"]),
        ops_per_s=rate,
        p50_ms=float(status["p50_ms"]),
        p99_ms=float(status["p99_ms"]),
        d1_ms=float(deadlines["d1"]),
        d2_ms=float(deadlines["d2"]),
        q_ms=float(deadlines["q"]),
        answer_ms=float(overtime["answer"]),
        woke_late_ms=float(overtime["late"]),
        lack_ms=float(overtime["lack"]),
        waited_ms=float(overtime["waited"]),
        sent_mbit_s=sent,
        rate_mbit_s=min(rates, default=None),
        rtt_us=max(rtts, default=None),
        incast=int(status["incast"]["own"]),
        map_id=int(owner_map["id"]),
        owns=int(status["rank"]) in owner_map["owners"],
        rotate=bool(owner_map["rotate"]),
        delivered=float(status["delivered"]),
        late=sum(int(p["late"]) for p in peers.values()),
        lost=sum(int(p["lost"]) for p in peers.values()),
        refused=sum(int(p["refused"]) for p in peers.values()),
        absent=sum(int(p["absent"]) for p in peers.values()),
        repaired=sum(int(p["repaired"]) for p in peers.values()),
        drops=sum(int(n) for n in status["drops"].values()),
        late_ranks=_grown(status, before, ("late", "absent")),
        losing_ranks=_grown(status, before, ("lost",)),
        suspects=tuple(_words(f"{peer}{p['suspect']}") for peer, p in peers.items() if p["suspect"]),
        datapath=_words(status["datapath"]),
        event=_words(events[-1]["event"]) if events else "",
    )


def _words(value: object) -> str:
    """Text for a terminal: root reads files that others have written."""
    return "".join(c for c in str(value)[:_LONGEST] if c.isprintable())


def rows_of(statuses: Iterable[Mapping[str, Any]], before: Iterable[Mapping[str, Any]] = ()) -> list[Row]:
    """Rows of all that can be read as a status, by job and rank."""
    earlier = {_identity(s): s for s in before}
    rows = []
    for status in statuses:
        try:
            rows.append(row_of(status, earlier.get(_identity(status))))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            continue
    return sorted(rows, key=lambda r: (r.job, r.rank))


def _identity(status: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(status.get(name)) for name in ("cookie", "rank", "pid", "pidns"))  # others wrote them


def _state(status: Mapping[str, Any]) -> str:
    if float(status["age"]) > SILENT_AFTER:
        return f"silent {float(status['age']):.0f} s"
    behind = int(status["behind"])
    return f"{behind} behind" if behind > 0 else "ok"


def _grown(status: Mapping[str, Any], before: Mapping[str, Any] | None, names: tuple[str, ...]) -> tuple[int, ...]:
    """Peers of whom more rows were late (lost) since the earlier reading; without one, since the start."""
    grown = []
    for peer, now in status["peers"].items():
        then = before["peers"].get(peer, {}) if before is not None else {}
        if sum(int(now[n]) for n in names) > sum(int(then.get(n, 0)) for n in names):
            grown.append(int(peer))
    return tuple(sorted(grown))
