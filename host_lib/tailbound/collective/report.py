"""Counters of a rank as plain types: what was sent, summed, dropped by reason, and who was missing."""

from __future__ import annotations

from typing import Any

from tailbound.collective.job import Job
from tailbound.transport.rendezvous import Greeting, describe
from tailbound.wire.schema import FIRST_DROP, UNKNOWN_SENDER, Verdict


def snapshot(job: Job, greetings: list[Greeting]) -> dict[str, Any]:
    """A snapshot of everything counted since the start.

    ``verdicts`` counts packets by what became of them here; ``drops`` is the part of it that was refused, by reason;
    ``drops_by_sender`` the same by rank (``unknown``: not yet trusted). ``delivered`` is the fraction of expected rows
    (contributions to own rows, and results) that came in time. ``sent`` counts packets handed to the kernel.
    """
    verdicts = job.verdicts()
    totals = verdicts.sum(axis=0)
    counters = job.counters
    expected = counters["rows_expected"]
    return {
        "rank": job.rank,
        "ranks": job.ranks,
        "datapath": job.datapath.name,
        "peers": dict(describe(greetings)),
        "counters": {name: int(value) for name, value in sorted(counters.items())},
        "delivered": counters["rows_delivered"] / expected if expected else 1.0,
        "rows_summed": int(totals[Verdict.STORED] + totals[Verdict.ADDED]),
        "verdicts": {v.name: int(totals[v]) for v in Verdict if totals[v]},
        "drops": {v.name: int(totals[v]) for v in Verdict if v >= FIRST_DROP and totals[v]},
        "drops_by_sender": {
            ("unknown" if sender == UNKNOWN_SENDER else str(sender)): {
                v.name: int(verdicts[sender][v]) for v in Verdict if v >= FIRST_DROP and verdicts[sender][v]
            }
            for sender in [*range(job.ranks), UNKNOWN_SENDER]
            if verdicts[sender][FIRST_DROP:].any()
        },
        "contributions_by_sender": {
            str(rank): {"expected": int(job.by_sender[rank][0]), "summed": int(job.by_sender[rank][1])}
            for rank in job.peers
        },
        "results_by_owner": {
            str(rank): {"expected": int(job.by_owner[rank][0]), "present": int(job.by_owner[rank][1])}
            for rank in job.peers
        },
        "sent": {str(rank): _sent(job, rank) for rank in job.peers},
        "suspects": sorted(job.contribution_suspicion.suspects | job.result_suspicion.suspects),
        "gone": sorted(job.gone),
    }


def _sent(job: Job, rank: int) -> dict[str, Any]:
    counts = job.sender.counts[rank]
    return {
        "packets": counts.packets,
        "bytes": counts.bytes,
        "calls": counts.bursts,
        "lost": counts.lost,
        "errors": dict(counts.errors),
    }
