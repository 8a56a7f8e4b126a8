"""Counters of a rank as plain types: what was sent, summed, dropped by reason, and who was missing."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.collective.job import Job
from tailbound.kernel.core import core
from tailbound.observe.ledger import ROWS
from tailbound.transport.rendezvous import Greeting
from tailbound.transport.steps import label_text, step_of
from tailbound.wire.address import endpoint
from tailbound.wire.schema import FIRST_DROP, TIME_UNIT_US, UNKNOWN_SENDER, Stage, Verdict

#: Events in a snapshot and in a status.
_EVENTS, _EVENTS_SHORT = 64, 8


def snapshot(job: Job, greetings: list[Greeting]) -> dict[str, Any]:
    """A snapshot of everything counted since the start.

    ``verdicts`` counts packets by what became of them here; ``drops`` is the part of it that was refused, by reason;
    ``drops_by_sender`` the same by rank (``unknown``: not yet trusted). ``delivered`` is the fraction of expected rows
    (contributions to own rows, and results) that came in time. ``sent`` counts packets handed to the kernel.
    ``authenticated``: whether what is sent has to be made with the job's key. ``choice`` tells how results go, and why.
    ``ledger`` says of every peer the fates (``wire.schema.Fate``) of the rows that it should have brought, by stage:
    ``contributions`` to the own rows, and ``results``. ``lost_on_arrival``: packets that this host lost before any
    rule saw them, by place (``udp``: where socket buffers are small). ``status`` is what ``tailbound top`` shows.
    """
    verdicts = job.records.verdicts([*range(job.world), UNKNOWN_SENDER])
    totals, extra, now = verdicts.sum(axis=0), range(job.ranks, job.world), status(job, verdicts)
    alike = ("rank", "ranks", "datapath", "counters", "delivered", "drops", "lost_on_arrival", "event_counts")
    return {name: now[name] for name in alike} | {
        "authenticated": "on" if job.config.keyed else "off",
        "peers": {str(g.rank): f"{endpoint(g.address, g.port)} ({g.datapath})" for g in greetings},
        "rows_summed": int(totals[Verdict.STORED] + totals[Verdict.ADDED]),
        "verdicts": {v.name: int(totals[v]) for v in Verdict if totals[v]},
        "drops_by_sender": {
            name: _drops(counts)
            for name, counts in zip([*map(str, range(job.world)), "unknown"], verdicts, strict=True)
            if counts[FIRST_DROP:].any()
        },
        "ledger": {
            stage.name.lower(): {
                str(peer): job.accounts.ledger.entry(stage, peer, verdicts[peer])
                for peer in (*sorted(job.peers), *(extra if stage == Stage.RESULTS else ()))
            }
            for stage in Stage
        },
        "sent": {str(rank): job.sender.counts[rank].snapshot() for rank in (*job.peers, *extra)},
        "suspects": sorted(job.membership.suspects),
        "dead": sorted(job.membership.dead(step_of(job.sequence.upcoming))),
        "gone": sorted(job.membership.gone),
        "traffic": traffic(job),
        "choice": job.channels.snapshot(),
        "events": _events(job, _EVENTS),
        "status": now,
    }


def alone() -> dict[str, Any]:
    """A snapshot of a job of one rank, which sends nothing: the same keys, and nothing counted."""
    tables = (
        "peers", "counters", "verdicts", "drops", "drops_by_sender", "lost_on_arrival", "sent", "traffic", "choice",
        "event_counts",
    )  # fmt: skip
    found: dict[str, Any] = {name: {} for name in tables} | {n: [] for n in ("suspects", "dead", "gone", "events")}
    found["status"] = {"rank": 0, "ranks": 1, "delivered": 1.0}
    found["ledger"] = {stage.name.lower(): {} for stage in Stage}
    return {**found, **found["status"], "datapath": "none", "authenticated": "off", "rows_summed": 0}


#: Counters of words.
_SPOKEN = (
    "asked", "control_refused", "control_replayed", "repair_asked", "repair_gone", "rows_flushed", "rows_sent_again",
)  # fmt: skip


def status(job: Job, verdicts: NDArray[np.uint64] | None = None) -> dict[str, Any]:
    """What is worth seeing a few times a second, small and of plain types; times in ms, rates in Mb/s.

    May be called by any thread: it reads, and a number may be of the op before. ``verdicts``: if they have been read.
    """
    counts = job.records.verdicts([*range(job.world), UNKNOWN_SENDER]) if verdicts is None else verdicts
    accounts, states, learned, overtime = job.accounts, job.store.peer_states, job.deadlines, job.overtime
    half, tail = np.percentile(list(accounts.latency) or [0], (50, 99)).tolist()
    expected = job.counters["rows_expected"]
    flow, owner_map = traffic(job), job.sequence.map
    peers = {}
    for peer in sorted(job.peers):
        state, sent = states[peer], job.sender.counts[peer]
        known = bool(state["cookie"] == job.cookie)
        first, second = (accounts.ledger.entry(stage, peer, counts[peer]) for stage in Stage)
        peers[str(peer)] = {
            "lateness_ms": int(state["lateness"]) * TIME_UNIT_US / 1000 if known else None,
            "rtt_us": flow["rtt_us"].get(str(peer)),
            "rate_mbit_s": flow["rates"].get(str(peer), 0) * 8 / 1e6,
            "sent_packets": sent.packets,
            "sent_bytes": sent.bytes,
            **{name: first[name] + second[name] for name in ROWS},
            "suspect": _suspicion(job, peer),
        }
    said = job.queue.said
    names = {"contributions_sent": said.contributions, "results_sent": said.results, "repair_rows_sent": said.copies}
    names |= {name: getattr(job.voice, name) for name in _SPOKEN}
    return {
        "rank": job.rank,
        "ranks": job.ranks,
        "cookie": f"{job.cookie:08x}",
        "datapath": job.datapath.name,
        "time": time.time(),
        "monotonic": job.now() / 1e9,
        "op": label_text(job.marks.contributed),
        **{name: job.counters[name] for name in ("ops", "ops_incomplete", "ops_late", "ops_skipped", "ops_minority")},
        "p50_ms": half / 1e6,
        "p99_ms": tail / 1e6,
        "delivered": float(job.counters["rows_delivered"] / expected) if expected else 1.0,
        # of the largest ops
        "deadlines_ms": {
            "d1": learned.advertised / 1e6,
            "d2": learned.stage_two(learned.largest) / 1e6,
            "q": learned.quiet / 1e6,
        },
        # waited past deadlines; how long answers take; what the own thread waited for a core in one of the last ops at
        # most, and in all
        "overtime_ms": {
            "waited": overtime.waited / 1e6,
            "answer": overtime.answer / 1e6,
            "lack": overtime.lack / 1e6,
            "lacked": overtime.lacked / 1e6,
        },
        "deadline_hits": job.counters["seal_deadline_hits"] + job.counters["result_deadline_hits"],
        "map": {"id": owner_map.id, "owners": list(owner_map.owners)},
        "behind": job.steps.behind,
        "sent_bytes": sum(p["sent_bytes"] for p in peers.values()),
        "drops": _drops(counts.sum(axis=0)),
        "lost_on_arrival": dict(job.datapath.lost_on_arrival),
        "counters": {name: int(value) for name, value in sorted({**job.counters.copy(), **names}.items())},
        "peers": peers,
        "events": _events(job, _EVENTS_SHORT),
        "event_counts": dict(job.events.counts),
    }


def traffic(job: Job) -> dict[str, Any]:
    """How fast is sent, and why; rates in bytes per second (0: that of the link), round trips in microseconds.

    ``pace`` is that at which this rank can send to all others together.
    """
    queue, said, paths = job.queue, job.queue.said, job.queue.pacer.paths
    return {
        "stale": said.stale,
        "socket_full": said.waits,
        "held_by_rate": said.held,
        "pace": int(core().fast.tb_pace(queue.line)),
        "rates": {str(rank): int(path.rate) if path.limited else 0 for rank, path in paths.items()},
        "rtt_us": {str(rank): path.rtt / 1000 for rank, path in paths.items()},
        "rtt_by": ("nobody", "kernel", "thread")[said.ways if said.echoes else 0],
        "marked": int(job.store.peer_states["marked"].sum()),
        "marked_there": said.marked,
        "slowed": sum(path.slowed for path in paths.values()),
    }


def _drops(counts: NDArray[np.uint64]) -> dict[str, int]:
    return {v.name: int(counts[v]) for v in Verdict if v >= FIRST_DROP and counts[v]}


def _suspicion(job: Job, peer: int) -> str:
    """In which halves a peer is no longer waited for: ``""``, ``c``, ``r`` or ``cr``; ``bye`` after its goodbye."""
    if peer in job.membership.gone:
        return "bye"
    halves = (("c", job.membership.contribution), ("r", job.membership.result))
    return "".join(letter for letter, suspicion in halves if peer in suspicion.suspects)


def _events(job: Job, most: int) -> list[dict[str, Any]]:
    return [{"monotonic": e.ns / 1e9, "event": e.name, **e.fields} for e in job.events.recent(most)]
