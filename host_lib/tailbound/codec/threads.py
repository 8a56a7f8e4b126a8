"""Threads that share the codec's work on one op: groups are independent, and compiled code releases the GIL.

The transport thread does one part itself. A machine that has no cores to spare gets no further threads: there they
would take what the training computes with, and an op would be finished no sooner.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from typing import TypeVar

from tailbound.codec.scratch import Scratch
from tailbound.errors import ConfigError

T = TypeVar("T")

#: Most threads that are chosen by themselves: beyond that memory is the limit.
_MOST = 4
#: Cores for one thread, the training's own included.
_CORES_EACH = 4
#: Groups for which a further thread pays: to wake one takes some 50 us, to code so many at 1408 codes 1 ms.
_LEAST_GROUPS = 8
#: Groups of a piece, as a rule, 2 ms: smaller ones share better among threads that are held up, and let others be
#: answered sooner; after each the GIL is awaited.
_PIECE_GROUPS = 16


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
        self._threads = ThreadPoolExecutor(count - 1, "tailbound-codec") if count > 1 else None
        #: that of the calling thread
        self.scratch = self._scratches[0]
        #: called by the calling thread after each piece: what cannot wait until an op is coded, such as answers, which
        #: would else wait behind the results that are queued next
        self.meanwhile: Callable[[], object] = lambda: None

    def __len__(self) -> int:
        return len(self._scratches)

    @property
    def alone(self) -> int:
        """Groups that the calling thread does in one piece."""
        return 2 * (_LEAST_GROUPS if len(self) > 1 else _PIECE_GROUPS) - 1

    def each(self, groups: int, work: Callable[[Scratch, tuple[int, int]], T], *, divide: bool = True) -> list[T]:
        """``work(scratch, (low, high))`` over pieces of ``groups``, at the same time; what each gave, in no order.

        A thread that is done with a piece takes the next one. So a thread that waits for a core delays nobody: the
        others do its work, and one that has not begun by then is not waited for.

        Without ``divide``, all of them are one piece.
        """
        threads = max(1, min(len(self._scratches), groups // _LEAST_GROUPS)) if divide else 1
        pieces = max(threads, groups // _PIECE_GROUPS) if divide else 1
        if pieces == 1:
            alone = [work(self.scratch, (0, groups))]
            self.meanwhile()
            return alone
        left = deque(pairwise(groups * piece // pieces for piece in range(pieces + 1)))

        def run(scratch: Scratch, meanwhile: Callable[[], object] = lambda: None) -> list[T]:
            done = []
            while left:
                try:
                    piece = left.popleft()
                except IndexError:  # another thread has taken the last one
                    break
                try:
                    done.append(work(scratch, piece))
                except BaseException:
                    left.clear()
                    raise
                meanwhile()
            return done

        others = [self._threads.submit(run, scratch) for scratch in self._scratches[1:threads]] if self._threads else []
        try:
            found = run(self.scratch, self.meanwhile)
        finally:  # nobody may still write to the op's memory when this returns
            rest = [other.result() for other in others if not other.cancel()]
        return [*found, *chain.from_iterable(rest)]

    def close(self) -> None:
        """Ends the threads."""
        if self._threads is not None:
            self._threads.shutdown()
