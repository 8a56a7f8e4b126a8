"""Part one: sequences of faults on the simulated engine (``sim.test_machine``), with other seeds every time.

A sequence that fails is made as short as the time allows, and printed: the lines of its example are a test.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
import traceback
import unittest
from collections import Counter

from hypothesis import Phase, settings
from hypothesis import seed as seeded
from hypothesis.database import InMemoryExampleDatabase
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from sim.test_machine import Training
from soak.part import Over, Tell, is_over, over

#: Sequences of one seed.
SEQUENCES = 25


def lacking() -> str:
    """Why this part cannot run here, or nothing."""
    return ""


def counted(machine: type[RuleBasedStateMachine], tell: Tell) -> type[RuleBasedStateMachine]:
    """``machine``, which tells of every sequence that it is through with."""

    class Counted(machine):  # type: ignore[misc, valid-type]
        def teardown(self) -> None:
            try:
                super().teardown()
            finally:
                world = getattr(self, "world", None)
                tell("sequences", 1)
                if world is not None:
                    tell("virtual", world.fabric.now / 1e9)
                    tell("ops", sum(len(node.over) for node in world.nodes))

    Counted.__name__ = Counted.__qualname__ = machine.__name__
    return Counted


def tried(
    machine: type[RuleBasedStateMachine], number: int, sequences: int = SEQUENCES, until: float | None = None
) -> str:
    """Sequences of seed ``number``; the shortest that fails, as hypothesis prints it, or nothing.

    Where time is over (``until``, or SIGTERM), what has failed by then is what counts, as short as it has become.
    """
    kept = InMemoryExampleDatabase()
    common = settings(machine.TestCase.settings, derandomize=False, database=kept, max_examples=sequences)

    def run(*phases: Phase) -> str:
        try:
            run_state_machine_as_test(seeded(number)(machine), settings=settings(common, phases=phases))
        except unittest.SkipTest:  # nothing is kept
            return ""
        except Exception as error:
            return f"seed {number}:\n" + "".join(traceback.format_exception(error))
        return ""

    found = ""
    if until is not None:
        signal.setitimer(signal.ITIMER_REAL, max(0.1, until - time.monotonic()), 1.0)
    try:
        with contextlib.suppress(Over):
            found = run(Phase.generate, Phase.shrink)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    # whatever was interrupted may have failed for that alone
    return run(Phase.reuse) if is_over() else found


def work(number: int, seed: int, until: float, tell: Tell) -> None:
    """Tries seed after seed until ``until`` (monotonic)."""
    logging.disable(logging.CRITICAL)  # thousands of warnings of silent ranks say nothing here
    signal.signal(signal.SIGALRM, over)
    machine = counted(Training, tell)
    while time.monotonic() < until and not is_over():
        if found := tried(machine, seed, until=until):
            tell("found", found)
        seed += 1


def said(counts: Counter[str]) -> str:
    """How far it is."""
    return f"{counts['sequences']} sequences, {counts['virtual']:.0f} s of virtual time, {counts['ops']:,} ops"
