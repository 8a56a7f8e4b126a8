"""The ops of one rank that are in flight: which have room, which are foreseen, which are over (clock-2, clock-19)."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from functools import partial

from tailbound.collective.buffers import STEPS_KEPT, BufferPool
from tailbound.collective.contribute import lay_decoding, lay_own, new_buffers
from tailbound.collective.job import Job
from tailbound.collective.op import Launch, Op
from tailbound.kernel.core import address, core
from tailbound.transport.queue import SendQueue
from tailbound.transport.sequence import Place, Position
from tailbound.transport.steps import STEP_MASK, index_of, step_distance, step_of
from tailbound.wire.packets import record_of
from tailbound.wire.schema import CONTROL, OP_PER_STEP, OP_STEPS, Phase, op_label, serial_distance

#: ``control.first_op`` follows at this distance: far enough for words about old ops, near enough for serial numbers.
_FIRST_OP_LAG = 1 << 24


class Window:
    """Ops from their first sign of life until their slots are free again.

    Args:
        job: of the rank.
        queue: forgets what is queued of ops that are left.
        placed: called with every op that has got a place or a launch.

    Attributes:
        ops: by label, in the order of labels.
        waiting: launched, and without room.
        recent: (label, start) of the last ops that are over.
        pool: memory of the ops, and the results that are kept of those that are over.
    """

    def __init__(self, job: Job, queue: SendQueue, placed: Callable[[Op], None]) -> None:
        self._job, self._queue, self._placed = job, queue, placed
        self.pool = BufferPool(partial(new_buffers, job), job.terms, job.store.result_rows)
        self._control = record_of(CONTROL).from_address(address(job.store.control))
        self.ops: dict[int, Op] = {}
        self.waiting: deque[Launch] = deque()
        self.recent: deque[tuple[int, int]] = deque(maxlen=4)
        self._told = 0  # changes of deadlines
        self._named = (job.sequence.next_label - 1) & 0xFFFFFFFF  # the newest op that a packet has named

    @property
    def launched(self) -> bool:
        """Whether an op of this rank's own is in flight."""
        return any(op.launch is not None for op in self.ops.values())

    @property
    def sum_base(self) -> int:
        """Where the window begins in the own ring of sums; no op counts that was placed by a map others have left."""
        sequence, rank = self._job.sequence, self._job.rank
        places = (op.place for op in self.ops.values())
        right = (each for each in places if each.placement.owner_map == sequence.map_at(each.step))
        return next(right, sequence).sum_seqs[rank]

    # -- into it --------------------------------------------------------------------------------------------------

    def admit(self) -> list[Op]:
        """Places launched ops in order, as far as the ring has room (half of it: peers may lag by the other half).

        Returns:
            Those that have been placed; the library takes them at its next look.
        """
        job, placed = self._job, []
        while self.waiting:
            launch = self.waiting[0]
            if not self._room(launch.layout.shape.rows) or not self._recordable(job.sequence.upcoming):
                break
            place, wrong = job.sequence.assign(launch.layout)
            for old in wrong:
                self.drop(old)
            op = self.ops.get(place.label) or self._open(place)
            op.launch, op.admitted, op.empty = launch, job.now(), not launch.contribute
            self.waiting.popleft()  # not before: what fails here must still be found and completed
            op.cold = op.switched and job.scales(op) is None
            self._placed(op)
            lay_own(job, op)
            lay_decoding(job, op)
            core().fast.tb_hand(job.terms.pointer, ctypes.addressof(op))
            placed.append(op)
        return placed

    def foresee(self, named: int | None = None) -> bool:
        """Places ops in advance, as far as the last steps let us tell (clock-2); whether there were any.

        Args:
            named: up to this one, which a packet has just named; None: up to the newest of those, for which there was
                no room.
        """
        job, placed, label = self._job, False, self._named if named is None else named
        if serial_distance(label, self._named) > 0:
            self._named = label
        while serial_distance(label, job.sequence.next_label) >= 0:
            held = sum(op.place.layout.shape.rows for op in self.ops.values())
            if 2 * held > job.store.result_rows or not self._recordable(job.sequence.next_label):
                break
            if step_of(label) != step_of(job.sequence.next_label) and held:
                break
            place = job.sequence.predict()
            if place is None:
                break
            op = self._open(place)
            core().fast.tb_enter(job.terms.pointer, ctypes.addressof(op))
            self._placed(op)
            placed = True
        return placed

    def _room(self, rows: int) -> bool:
        pending = sum(op.place.layout.shape.rows for op in self.ops.values() if op.launch is not None)
        return pending == 0 or 2 * (pending + rows) <= self._capacity()

    def _capacity(self) -> int:
        """Rows that may be in flight and kept for who lags, in all rings that the next op uses."""
        job, owner_map = self._job, self._job.sequence.map
        results, sums = job.least_rings
        if job.config.switch is not None and job.switched(owner_map):
            return min(results, job.config.switch.rows)
        return min(results, sums * len(owner_map.owners))

    def _recordable(self, label: int) -> bool:
        """Whether op records last: peers may lag by as much again, and must keep the record of an op they are in."""
        if not self.ops:
            return True
        oldest = next(iter(self.ops))
        steps = step_of(label) - step_of(oldest) & STEP_MASK
        first = index_of(oldest) if steps == 0 else 0
        return steps < OP_STEPS // 2 and index_of(label) - first < OP_PER_STEP // 2

    def _open(self, place: Place) -> Op:
        job, shape, owner_map = self._job, place.layout.shape, place.placement.owner_map
        buffers, switched = self.pool.acquire(shape, place.placement), job.switched(owner_map)
        op = Op(place, buffers, job.rank, job.ranks, switched=switched)
        job.deadlines.tell(op, op.flow_bytes)
        self.ops[place.label] = op
        return op

    def learned(self) -> None:
        """Tells ops in flight what deadlines have learned, if that is anything: their clocks may start by it."""
        deadlines = self._job.deadlines
        if deadlines.changes != self._told:
            self._told = deadlines.changes
            for op in self.ops.values():
                deadlines.tell(op, op.flow_bytes)

    # -- out of it ------------------------------------------------------------------------------------------------

    def drop(self, place: Place) -> None:
        """Forgets a prediction that this rank's own launch has proved wrong."""
        op = self.ops.pop(place.label, None)
        if op is not None:
            self._leave_behind(op)
            self._job.counters["predictions_wrong"] += 1

    def _leave_behind(self, op: Op) -> None:
        self._queue.cancel(op.label)
        if not op.returned:
            self.pool.give(op.place.layout.shape, op.place.placement, op.buffers)
        self._end(op)

    def _end(self, op: Op) -> None:
        core().fast.tb_leave(self._job.terms.pointer, ctypes.addressof(op))

    def close(self) -> None:
        """Lets go of what ops have of the library; the thread has ended."""
        for op in self.ops.values():
            self._end(op)

    def release(self) -> bool:
        """Moves the window past ops that are over, in order; only the host moves it (clock-19). Whether it moved."""
        core().fast.tb_publish(ctypes.addressof(self._job.voice))  # of ops without own rows, which have no results
        moved: Place | None = None
        for label, op in list(self.ops.items()):
            if not op.finished or op.first.phase != Phase.DONE:
                break
            del self.ops[label]
            self._end(op)
            moved = op.place
            self.recent.append((label, op.start))
            self._queue.cancel(label)
            self._keep(op)
        self._keep_early()
        if moved is None:
            return False
        self._job.turn_keys(moved.step, moved.placement.owner_map.turns)
        self._move(moved.label, moved.result_seq + moved.layout.shape.rows)
        return True

    def _move(self, released: int, result_base: int) -> None:
        """Moves the window behind op ``released``: that is said before what may be written over."""
        control = self._control
        control.released = released
        control.result_base, control.sum_base = result_base & 0xFFFFFFFF, self.sum_base
        if serial_distance(released, control.first_op) > 2 * _FIRST_OP_LAG:
            control.first_op = (released - _FIRST_OP_LAG) & 0xFFFFFFFF

    def _keep(self, op: Op) -> None:
        if not op.returned:
            op.returned = True
            op.given = op.results = 0  # those are found among the kept ones
            self.pool.keep(op.place, op.buffers, op.buffers.given if op.queued else None)

    def _keep_early(self) -> None:
        """Ops whose results are still leaving need none of their other memory, which the next step uses."""
        first = next(iter(self.ops.values()), None)
        for op in self.ops.values():
            assert first is not None
            if not op.spent or step_distance(op.place.step, first.place.step) >= STEPS_KEPT:
                break
            self._keep(op)

    def jump(self, to: Position) -> None:
        """Leaves everything before ``to`` behind (clock-20); nothing is launched."""
        job = self._job
        for op in self.ops.values():
            self._leave_behind(op)
        self.ops.clear()
        self.recent.clear()
        job.sequence.jump(to)
        before = (op_label(to.step, 0) - 1) & 0xFFFFFFFF
        job.marks.contributed = job.marks.published = self._named = before
        job.turn_keys(to.step, job.sequence.map.turns)
        self._move(before, to.result_seq)
