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

from tailbound.codec.balance_table import NO_TABLE, Key, Table, Tables, digest_of
from tailbound.codec.exponents import are_off, ends_of, merged, rounded, sizes_of, wanted
from tailbound.codec.scale import NEED_LEAST
from tailbound.collective.op import Op
from tailbound.collective.speaker import Speaker
from tailbound.errors import TransportError
from tailbound.transport.config import MS
from tailbound.transport.reliable import Refusal, Reliable
from tailbound.transport.steps import step_distance

#: Name of the request on the reliable path: the table of a digest.
REQUEST = "exponents"
_DIGEST = struct.Struct("!Q")
#: Seconds that a peer has to answer.
_PEER = 3.0
#: In its first steps a model changes fast: every second average is looked at, and the last one counts alone.
_YOUNG = 40
#: Later on some before each change that may come: every fourth, which counts as much as all before. A change makes all
#: ops cold, so exponents stay for some steps at least, for twice as many after every change.
_EVERY, _SHARE, _LOOKS = 4, 0.5, 4
_LEAST, _MOST = 8, 512
#: A table that not all ranks have after so long, ns, is given up, and none is made for a while: changes of owners wait
#: for it, too.
_PATIENCE, _PAUSE = 1000 * MS, 10_000 * MS
#: Quarter powers of two by which a scale jumps, so that the average is looked at at once.
_JUMP = 8


class Balancing:
    """What one rank, while it leads, would have agreed on."""

    def __init__(self, job: Speaker) -> None:
        self._job = job
        #: this rank is the lowest one that lives
        self.leads = False
        #: digest of the table that it wants; None: that in force
        self.wish: int | None = None
        self._first, self._step, self._wished = job.config.first_step, -1, job.config.first_step
        self._least, self._since, self._pause = _LEAST, 0, 0
        self._made = NO_TABLE  # the wish, if it is a table that no map has
        self._seen: dict[Key, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
        self._known: dict[Key, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
        self._scales: dict[tuple[int, int, int, int], NDArray[np.int16]] = {}
        self._fresh = self._urgent = False

    def observe(self, op: Op) -> None:
        """Looks at the average of an op that is over, before anybody may change it."""
        job, launch, outcome, step = self._job, op.launch, op.outcome, op.place.step
        if not (self.leads and job.config.balance and job.sequence.stable and launch is not None):
            return
        jumped = self._jumped(op)
        if not (jumped or self._due(step)):
            return
        if outcome.failed_groups or outcome.void or outcome.skipped or outcome.error is not None:
            return  # the step is left out: not all of it is there
        shape = op.place.layout.shape
        ends = ends_of(launch.starts, launch.first, shape.numel)
        powers = launch.coder.powers(launch.out, shape, ends)
        if not np.isfinite(powers).all():
            return
        key, found = op.key[:3], (ends, sizes_of(powers))
        if jumped and key in self._known:
            self._known[key], self._fresh, self._urgent = found, True, True
        if not self._due(step):
            return
        if step != self._step:
            self._step, self._seen = step, {}
        self._seen[key] = found
        if len(self._seen) == len(job.sequence.op_rows):
            self._take()

    def look(self, present: int, step: int) -> int:
        """Digest of the table that there should be, with ``present`` in force; ``step`` is the present one."""
        now, tables = self._job.now(), self._job.tables
        if self.wish is not None and now - self._since >= _PATIENCE:
            tables.forget(self._made)
            self.wish, self._pause = None, now + _PAUSE
        waits = 0 if self._young(step) else _LEAST if self._urgent else self._least
        if self._fresh and self.wish is None and now >= self._pause and step_distance(step, self._wished) >= waits:
            self._fresh = self._urgent = False
            table = tables.table(present)
            found = {key: (ends, wanted(sizes, ends)) for key, (ends, sizes) in self._known.items()}
            if any(_is_off(table, key, ends, wish) for key, (ends, wish) in found.items()):
                made = Table({key: (ends, rounded(wish)) for key, (ends, wish) in found.items()})
                data = made.encode()
                self._made = NO_TABLE if tables.knows(digest_of(data)) else digest_of(data)
                self.wish, self._wished, self._since = tables.add(data), step, now
                self._least = self._least if self._young(step) else min(2 * self._least, _MOST)
        return present if self.wish is None else self.wish

    def settled(self, present: int) -> None:
        """Maps have changed; ``present`` is the newest one's table."""
        self.wish = None
        self._scales = {key: known for key, known in self._scales.items() if key in self._job.exponents}

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
        return bool(
            (rise[before > NEED_LEAST] >= _JUMP).any()
        )  # groups that were zero, or of which nothing came, do not

    def _young(self, step: int) -> bool:
        return step_distance(step, self._first) < _YOUNG

    def _due(self, step: int) -> bool:
        if self._young(step):
            return step_distance(step, self._first) % 2 == 0
        soon = step_distance(step, self._wished) >= self._least - _LOOKS * _EVERY
        return soon and step_distance(step, self._first) % _EVERY == 0

    def _take(self) -> None:
        """A whole step has been looked at."""
        share = 1.0 if self._young(self._step) else _SHARE
        known, self._known, self._fresh = self._known, dict(self._seen), True
        for key, (ends, sizes) in self._seen.items():
            before = known.get(key)
            if before is not None and np.array_equal(before[0], ends):
                self._known[key] = ends, merged(before[1], sizes, share)


def _is_off(table: Table | None, key: Key, ends: NDArray[np.int64], wish: NDArray[np.float64]) -> bool:
    """Whether ``table`` has other exponents for an op than it should."""
    found = table.ops.get(key) if table is not None else None
    if found is None or not np.array_equal(found[0], ends):
        return are_off(np.zeros(len(ends), np.uint8), wish, ends)
    return are_off(found[1], wish, ends)


def serve(reliable: Reliable, tables: Tables) -> None:
    """Answers ranks that ask for a table."""

    def answer(request: bytes) -> list[bytes]:
        if len(request) != _DIGEST.size:
            raise Refusal(f"a request of {len(request)} bytes")
        data = tables.encoded(*_DIGEST.unpack(request))
        if data is None:
            raise Refusal("these exponents are not known here any more")
        return [data]

    reliable.serve(REQUEST, answer)


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
