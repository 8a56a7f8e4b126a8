"""Exponents of tensors (codec-18): the leader of owner maps sees from averages what they should be; others fetch them.

A table of exponents is part of what is agreed on with a map (``transport.agreement``): its digest is in the map, and a
rank acknowledges no map, and takes none for settled, before it has the table. So ranks that differ in exponents refuse
each other's rows, as ranks that differ in owners do.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from tailbound.codec.balance import ranges_of
from tailbound.codec.balance_table import NO_TABLE, Entry, Key, Table, Tables, digest_of
from tailbound.codec.exponents import are_off, changes, ends_of, merged, moves, rounded, sizes_of, wanted
from tailbound.codec.hashing import seed_of
from tailbound.codec.records import Coding
from tailbound.codec.scale import NEED_LEAST
from tailbound.codec.scratch import Scratch
from tailbound.collective.op import Launch, Op
from tailbound.collective.speaker import Speaker
from tailbound.errors import TransportError
from tailbound.transport.config import MS
from tailbound.transport.reliable import Refusal, Reliable
from tailbound.transport.requests import of_form
from tailbound.transport.steps import Young, step_distance

#: Name of the request on the reliable path: the table of a digest.
REQUEST = "exponents"
_DIGEST = struct.Struct("!Q")
#: Seconds that a peer has to answer.
_PEER = 3.0
#: In its first steps a model changes fast: averages are looked at in each of them, and exponents may change as soon as
#: the change before is in force.
_YOUNG = 60
#: There a step counts with ``_NEWEST`` over the number of the step, ``_RECENT`` at least: sizes drift the faster the
#: younger a model is, and later on they go up and down by much more than they drift.
_NEWEST, _RECENT = 10, 0.25
#: Later on each op some times before each change that may come: every fourth step, which counts as much as all before.
#: Exponents stay for some steps at least, for twice as many after every change.
_EVERY, _SHARE, _LOOKS = 4, 0.5, 4
_LEAST, _MOST = 8, 512
#: Rows of ops that are looked at in one step; with more in a step, every op comes less often.
_ROWS = 8192
#: A table that not all ranks have after so long, ns, is given up, and none is made for a while: changes of owners wait
#: for it, too.
_PATIENCE, _PAUSE = 1000 * MS, 10_000 * MS
#: Quarter powers of two by which a scale jumps, so that the average is looked at at once.
_JUMP = 8
#: Where contributions cannot be shifted (a switch), scales are moved by so much more, in quarter powers of two.
_SPARE = 4


class Balancing:
    """What one rank, while it leads, would have agreed on."""

    def __init__(self, job: Speaker) -> None:
        self._job = job
        #: this rank is the lowest one that lives
        self.leads = False
        #: digest of the table that it wants; None: that in force
        self.wish: int | None = None
        self._young = Young(job.config.first_step, _YOUNG)
        self._step: int | None = None  # the newest one that this was told of
        self._old = False
        self._waited = 0  # steps since the last wish
        self._least, self._since, self._pause = _LEAST, 0, 0
        self._present = NO_TABLE  # of the newest map
        self._known: dict[Key, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
        self._better: dict[Key, Entry] = {}  # of ops whose exponents are off
        self._scales: dict[tuple[int, int, int, int], NDArray[np.int16]] = {}
        self._urgent = False
        self._scratch: Scratch | None = None

    def observe(self, op: Op) -> None:
        """Looks at the average of an op that is over, before anybody may change it."""
        job, launch, outcome = self._job, op.launch, op.outcome
        self._pass(op.place.step)
        if not (self.leads and job.config.balance and job.sequence.stable and launch is not None):
            return
        jumped = self._jumped(op)
        if not (jumped or self._due(op.place.step, op.place.index)):
            return
        if outcome.failed_groups or outcome.void or outcome.skipped or outcome.error is not None:
            return  # not all of it is there
        key, shape = op.key[:3], op.place.layout.shape
        ends = ends_of(launch.starts, launch.first, shape.numel)
        powers = launch.coder.powers(launch.out, shape, ends)
        if not np.isfinite(powers).all():
            return
        seen, before = sizes_of(powers), self._known.get(key)
        if before is not None and np.array_equal(before[0], ends):
            seen = merged(before[1], seen, self._share(jumped))
        self._known[key] = ends, seen
        if self.wish is not None or job.tables.mark(self._present, key, shape.numel) != op.balance:
            return  # others are on their way
        self._better.pop(key, None)
        better = self._improve(op, launch, ends, wanted(seen, ends))
        if better is not None:
            self._better[key] = better
            self._urgent |= jumped

    def look(self, present: int, step: int) -> int:
        """Digest of the table that there should be, with ``present`` in force; ``step`` is the present one."""
        now, tables = self._job.now(), self._job.tables
        self._pass(step)
        if self.wish is not None and now - self._since >= _PATIENCE:
            tables.forget(self.wish)
            self.wish, self._pause = None, now + _PAUSE
        waits = 0 if not self._old else _LEAST if self._urgent else self._least
        if self._better and self.wish is None and now >= self._pause and self._waited >= waits:
            ops = {layout.key[:3]: layout.shape.numel for layout in self._job.sequence.layouts}
            better = {
                key: entry
                for key, entry in self._better.items()
                if key in ops and tables.mark(present, key, ops[key]) == entry.before
            }
            table, self._better, self._urgent = tables.table(present), {}, False
            if better:
                kept = {key: entry for key, entry in table.ops.items() if key in ops} if table is not None else {}
                self.wish, self._waited, self._since = tables.add(Table(kept | better).encode()), 0, now
                self._least = min(2 * self._least, _MOST) if self._old else self._least
        return present if self.wish is None else self.wish

    def settled(self, present: int) -> None:
        """Maps have changed; ``present`` is the newest one's table."""
        self.wish, self._present = None, present
        self._scales = {key: known for key, known in self._scales.items() if key in self._job.exponents}

    def _improve(self, op: Op, launch: Launch, ends: NDArray[np.int64], wish: NDArray[np.float64]) -> Entry | None:
        """Exponents near to ``wish`` for an op, and how its scales move with them; None: what it has will do."""
        job, shape, key = self._job, op.place.layout.shape, op.key[:3]
        digest = op.place.placement.owner_map.balance
        entry = job.tables.entry(digest, key, shape.numel)
        old = (entry.ends, entry.exponents) if entry is not None else (np.array([shape.numel]), np.zeros(1, np.uint8))
        here = old[1][np.searchsorted(old[0], ends)]
        if not are_off(here, wish, ends):
            return None
        self._scratch = self._scratch or Scratch(job.store.width)
        exponents = rounded(wish)
        ranges = job.tables.ranges(digest, key, shape.numel), ranges_of(ends, exponents)
        codings = [Coding(seed_of(job.cookie, op.label), rotate=op.rotate, ranges=each) for each in ranges]
        needs = launch.coder.needs(launch.out, shape, codings, self._scratch)
        if needs is None:
            return None
        bounds = changes((old[0], ends), (old[1], exponents), shape.group_entries)
        spare = 0 if job.switch is None else _SPARE
        return Entry(ends, exponents, op.balance, op.plain[3], moves((needs[0], needs[1]), bounds, spare))

    def _jumped(self, op: Op) -> bool:
        """Whether the scale of a group has become much larger since the op before: a tensor has, that was small."""
        scales = self._job.exponents.get(op.key)
        before = self._scales.get(op.key)
        if scales is None:
            return False
        self._scales[op.key] = scales
        if before is None or len(before) != len(scales):
            return False
        rise = scales.astype(np.int32) - before
        return bool((rise[before > NEED_LEAST] >= _JUMP).any())  # not of groups that were zero, or lost

    def _pass(self, step: int) -> None:
        """Counts steps up to ``step``; one before those that are known (of an op that ends late) counts nothing."""
        ahead = 0 if self._step is None else step_distance(step, self._step)
        if self._step is None or ahead > 0:
            self._step = step
            self._waited += ahead
            self._old = not self._young.at(step)

    @property
    def _turns(self) -> int:
        """Steps from one look at an op to the next."""
        return max(-(-sum(self._job.sequence.op_rows) // _ROWS), _EVERY if self._old else 1)

    def _share(self, jumped: bool) -> float:
        """With how much sizes that were just seen count, beside all that were seen before."""
        if self._old or self._step is None:
            return 1.0 if jumped else _SHARE
        age = step_distance(self._step, self._job.config.first_step) + 1
        return float(1 - (1 - min(1.0, max(_NEWEST / age, _RECENT))) ** self._turns)

    def _due(self, step: int, index: int) -> bool:
        """Whether the op of this index is looked at in ``step``: ops take turns, so that no step has much to do."""
        turn, turns = sum(self._job.sequence.op_rows[:index]) // _ROWS, self._turns
        if self._old and self._waited < self._least - _LOOKS * turns:
            return False
        return step % turns == turn


def serve(reliable: Reliable, tables: Tables) -> None:
    """Answers ranks that ask for a table."""

    def answer(digest: int) -> list[bytes]:
        data = tables.encoded(digest)
        if data is None:
            raise Refusal("these exponents are not known here any more")
        return [data]

    reliable.serve(REQUEST, of_form(_DIGEST, answer))


def fetch(pull: Callable[..., bytes | bytearray], rank: int, digest: int) -> bytes:
    """The encoded table of ``digest`` from ``rank``; ``pull``: of ``Reliable``.

    Raises:
        TransportError: it has none, cannot be reached, or sent another one.
    """
    data = bytes(pull(rank, REQUEST, _DIGEST.pack(digest), _PEER))
    if digest_of(data) != digest:
        raise TransportError(f"rank {rank} sent other exponents than were asked for: run one version on all ranks")
    return data


class Fetcher:
    """Gets tables in a thread, so that the engine does not wait for them.

    Args:
        pull: of ``Reliable``.
        call: runs a function in the engine's thread (``Transpose.call``).
        tables: where they go.
    """

    def __init__(
        self, pull: Callable[..., bytes | bytearray], call: Callable[[Callable[[], object]], object], tables: Tables
    ) -> None:
        self._pull, self._call, self._tables = pull, call, tables
        self._busy: set[int] = set()

    def __call__(self, rank: int, digests: Iterable[int]) -> None:
        """Begins to get from ``rank`` what is not on its way already; failures are tried again by who asks again."""
        for digest in set(digests) - self._busy:
            self._busy.add(digest)
            threading.Thread(target=self._get, args=(rank, digest), name="tailbound-exponents", daemon=True).start()

    def _get(self, rank: int, digest: int) -> None:
        try:
            data = fetch(self._pull, rank, digest)
            self._call(lambda: self._tables.add(data))
        except (TransportError, ValueError):
            pass
        finally:
            self._busy.discard(digest)
