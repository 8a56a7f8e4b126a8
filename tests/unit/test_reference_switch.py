"""The switch that worker tests run against follows the list that the real ones are held to (kernel-24)."""

from __future__ import annotations

import pytest

from reference_switch import Rules
from switch_cases import Form, cases, expected
from tailbound.wire.schema import Verdict

#: Addresses are its socket's business; it has one job, and knows all its ranks.
_ELSEWHERE = {None, Verdict.WRONG_ADDRESS}
CASES = [
    c
    for c in cases()
    if len(c.jobs) == 1 and c.jobs[0].registered is None and not {s.verdict for s in c.steps} & _ELSEWHERE
]


@pytest.mark.parametrize("form", ["mean", "sums"])
def test_the_reference_switch_does_what_the_list_says(form: Form) -> None:
    assert len(CASES) > 30
    for case in CASES:
        (job,) = case.jobs
        rules = Rules(job.cookie, job.ranks, job.headroom, job.rows, form)
        for step in case.steps:
            abandoned = rules.counts[Verdict.ABANDONED]
            verdict, out, everybody = rules.take(step.packet)
            assert verdict == step.verdict, case.name
            assert rules.counts[Verdict.ABANDONED] - abandoned == step.abandoned, case.name
            wanted = expected(step, form)
            assert (out or None) == wanted, case.name
            if wanted is not None:
                assert step.to == (tuple(range(job.ranks)) if everybody else (step.packet[14],)), case.name
