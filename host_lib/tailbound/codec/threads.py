"""Threads that share the codec's work on one op (``host_lib/core/crew.c``): groups are independent.

The transport thread does one part itself. A machine that has no cores to spare gets no further threads: there they
would take what the training computes with, and an op would be finished no sooner.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from tailbound.codec.scratch import Scratch
from tailbound.errors import ConfigError
from tailbound.kernel.core import core
from tailbound.wire.jit import entry
from tailbound.wire.packets import record_of
from tailbound.wire.schema import WORK

#: Most threads that are chosen by themselves: beyond that memory is the limit.
_MOST = 4
#: Cores for one thread, the training's own included.
_CORES_EACH = 4
#: Groups for which a further thread pays: to wake one takes some 50 us, to code so many at 1408 codes 1 ms.
_LEAST_GROUPS = 8
#: Groups of a piece, as a rule, 2 ms: smaller ones share better among threads that are held up, and let others be
#: answered sooner.
_PIECE_GROUPS = 16


class Work(record_of(WORK)):  # type: ignore[misc]
    """``tb_work``."""

    sum: int

    def again(self) -> int:
        """Makes it a pass that is still to be begun, with what its words say by now; where it is."""
        self.next = self.sum = self.failed = 0
        return ctypes.addressof(self)


def threads_for(asked: int, cores: int, ranks_here: int) -> int:
    """How many threads code an op.

    Args:
        asked: by the user; 0: one for each four of this rank's cores, at most four.
        cores: that this process may run on.
        ranks_here: ranks on this host, which share them.

    Raises:
        ConfigError: ``asked`` is negative.
    """
    if asked < 0:
        raise ConfigError(f"{asked} codec threads: give a number, or 0 to choose by the cores")
    return asked or max(1, min(_MOST, cores // (_CORES_EACH * max(1, ranks_here))))


def cores_here() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


class Threads:
    """``count`` threads, the calling one included, with a scratch for rows of ``width`` codes each.

    ``scratch``: of the calling thread, which others of its jobs may use, too.
    """

    def __init__(self, count: int, width: int, scratch: Scratch | None = None) -> None:
        self._scratches = [scratch or Scratch(width), *(Scratch(width) for _ in range(1, count))]
        others = [scratch.memory_at for scratch in self._scratches[1:]]
        self._crew = core().fast.tb_crew_open((ctypes.c_int64 * len(others))(*others), len(others)) if others else 0
        if self._crew is None:
            raise MemoryError(f"{len(others)} codec threads cannot be begun")
        #: that of the calling thread
        self.scratch = self._scratches[0]
        #: ``tb_sleep`` of the calling thread, which sends between two pieces; 0: it does not
        self.rest = 0
        #: does what is found between two pieces (``schema.Woken``), and what cannot wait for the next op (0) after them
        self.meanwhile: Callable[[int], object] = lambda found: None

    def __len__(self) -> int:
        return len(self._scratches)

    @property
    def alone(self) -> int:
        """Groups that the calling thread does in one piece."""
        return 2 * (_LEAST_GROUPS if len(self) > 1 else _PIECE_GROUPS) - 1

    def run(self, code: Callable[[int, int, int, int], int], at: int, end: int, unit: int = 1) -> int:
        """A pass over many groups, in pieces at the same time, without the GIL in between.

        A thread that is done with a piece takes the next one. So a thread that waits for a core delays nobody: the
        others do its work, and one that has not begun by then is not waited for.

        Args:
            code: compiled: (where words are, low, high, where working memory is); what it returns adds up.
            at: where the words are.
            end: of groups, or rows, from 0.
            unit: of them in a group.

        Returns:
            The sum; -1 where a piece returned less than 0: the others may be undone.
        """
        work = self.work(code, at, end, unit)
        try:
            self.through(core().waits.tb_work, ctypes.addressof(work), self.scratch.memory_at, self.rest)
        except BaseException:
            self.stop(work)
            raise
        self.meanwhile(0)
        return -1 if work.failed else int(work.sum)

    def through(self, what: Callable[..., int], *arguments: int) -> None:
        """Calls ``what`` of the library until it is done; before, it returns with what cannot wait."""
        back = core().fast.tb_back
        while found := what(*arguments) | back(self.rest):
            self.meanwhile(found)

    def stop(self, work: Work) -> None:
        """Ends a pass that was interrupted: no thread writes to the op's memory any more when this returns."""
        work.next = work.end
        core().waits.tb_work(ctypes.addressof(work), self.scratch.memory_at, 0)

    def work(self, code: Callable[[int, int, int, int], int], at: int, end: int, unit: int = 1) -> Work:
        """What threads share a pass by; see ``run``."""
        groups = -(-end // unit)
        threads = max(1, min(len(self._scratches), groups // _LEAST_GROUPS))
        pieces = max(threads, groups // _PIECE_GROUPS)
        piece = -(-groups // pieces) * unit
        return Work(entry(code), at, end=end, piece=piece, crew=self._crew, members=threads - 1)

    def close(self) -> None:
        """Ends the threads."""
        if self._crew:
            core().waits.tb_crew_close(self._crew)
            self._crew = 0
