"""Part one: sequences of faults on the simulated engine (``sim.test_machine``), with other seeds every time.

A sequence that fails is made as short as the time allows, and printed: the lines of its example are a test.
"""

from __future__ import annotations

import contextlib
import traceback
import unittest
from collections.abc import Callable, Iterator

from hypothesis import Phase, settings
from hypothesis import seed as seeded
from hypothesis.database import InMemoryExampleDatabase
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from sim.test_machine import Training
from soak.part import Over, Tell, is_over

#: Sequences of one seed.
SEQUENCES = 25


def lacking() -> str:
    """Why this part cannot run here, or nothing."""
    return ""


def counted(machine: type[RuleBasedStateMachine], tell: Tell) -> type[RuleBasedStateMachine]:
    """``machine``, which tells of every sequence that is over."""

    class Counted(machine):  # type: ignore[misc, valid-type]
        def teardown(self) -> None:
            try:
                super().teardown()
            finally:
                tell("sequences", 1)
                if (world := getattr(self, "world", None)) is not None:
                    tell("virtual", world.fabric.now / 1e9)
                    tell("ops", sum(len(node.over) for node in world.nodes))

    Counted.__name__ = Counted.__qualname__ = machine.__name__
    return Counted


def tried(machine: type[RuleBasedStateMachine], number: int, sequences: int = SEQUENCES) -> str:
    """Sequences of seed ``number``; the shortest that fails, as hypothesis prints it, or nothing.

    Where time is over, the sequence that has failed by then is what counts, as short as it has become.
    """
    kept = InMemoryExampleDatabase()
    common = settings(machine.TestCase.settings, derandomize=False, database=kept, max_examples=sequences)

    def run(*phases: Phase) -> str:
        try:
            run_state_machine_as_test(seeded(number)(machine), settings=settings(common, phases=phases))
        except unittest.SkipTest:  # nothing is kept
            return ""
        except Exception as error:
            return "\n" + "".join(traceback.format_exception(error))
        return ""

    found = ""
    with contextlib.suppress(Over):
        found = run(Phase.generate, Phase.shrink)
    return run(Phase.reuse) if is_over() else found  # the interruption itself may have failed, too


@contextlib.contextmanager
def trials(number: int, tell: Tell, until: float) -> Iterator[Callable[[int], str]]:
    """Some sequences a seed."""
    machine = counted(Training, tell)
    yield lambda seed: tried(machine, seed)
