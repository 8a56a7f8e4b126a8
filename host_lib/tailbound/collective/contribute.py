"""First half, sending side: encode, send contributions (codec-4 to codec-8, clock-17); for a switch agree on scales.

``step`` says what is to be done for the own rows of an op, and ``advance`` does it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from tailbound.codec import decode, encode, mean
from tailbound.codec.feedback import read_back
from tailbound.codec.hashing import seed_of
from tailbound.codec.owners import Placement
from tailbound.codec.records import NO_COUNTS, Coding, Received, Sums
from tailbound.codec.scale import agreed
from tailbound.codec.shape import Shape
from tailbound.collective import switched
from tailbound.collective.buffers import Buffers
from tailbound.collective.coder import HOST, Values
from tailbound.collective.job import Job
from tailbound.collective.op import Launch, Op
from tailbound.collective.step import Do, step, untold
from tailbound.kernel.core import address, core
from tailbound.wire.schema import EXPONENT_NONE, Sending


def prepare(job: Job, op: Op) -> None:
    """Queues on a device what comes before measuring and coding, ahead of the op's turn to send; once."""
    launch = op.launch
    if launch is None or not launch.coder.ahead or op.begun or op.silent or op.encoded:
        return
    _prepared(op)
    op.begun = job.now()
    op.ready = launch.coder.prepare(launch.data, op.place.layout.shape, coding_of(job, op))


def advance(job: Job, op: Op, now: int) -> tuple[bool, int]:
    """Does what is to be done for the own rows of an op.

    Returns:
        Whether a phase of the op has ended by it; when to look again, ns (0: when something arrives).
    """
    what, look = step(op, job, now)
    if what == Do.WAIT:
        return False, look
    _DO[what](job, op)
    return what != Do.TELL, look


def _abstain(job: Job, op: Op) -> None:
    _prepared(op)
    _done_sending(job, op)


def _stay_out(job: Job, op: Op) -> None:
    """One packet says so in place of rows that no rank takes."""
    _prepared(op)
    job.threads.stop(op.buffers.encodes)  # begun perhaps
    op.outcome.late = op.outcome.unsent = op.empty = True
    job.counters["late_launches"] += 1
    _done_sending(job, op)


def _measure(job: Job, op: Op) -> None:
    launch, need = _prepared(op), op.buffers.scales.need
    shape, coding = op.place.layout.shape, coding_of(job, op)
    if not launch.coder.measure(launch.data, shape, coding, need, job.threads):  # it is not finite
        need[:] = EXPONENT_NONE
    op.sending, op.cold_since = Sending.AGREEING, job.now()
    op.needs[job.rank] = need.copy()
    job.announce(op, job.peers)
    op.agreeing.ask(op.cold_since)


def _tell(job: Job, op: Op) -> None:
    job.announce(op, untold(op, job), asks=True)


def _agree(job: Job, op: Op) -> None:
    op.buffers.scales.exponents[:] = agreed(np.stack(list(op.needs.values())))
    _encode(job, op)


def _encode_first(job: Job, op: Op) -> None:
    _prepared(op)
    if op.switched and (scales := job.scales(op)) is not None:  # of the op before
        op.buffers.scales.exponents[:] = scales
    _encode(job, op)


def _encode_late(job: Job, op: Op) -> None:
    op.outcome.late = True
    job.counters["late_launches"] += 1
    _encode_first(job, op)


def coding_of(job: Job, op: Op) -> Coding:
    """How this rank codes ``op``."""
    if op.coded is not None:
        return op.coded
    seed, weights = seed_of(job.cookie, op.label), None if op.switched else job.weights
    op.coded = Coding(seed, weights, job.config.rotate, job.key_of(op.place))
    op.tag_key = address(op.coded.key)
    return op.coded


def new_buffers(job: Job, shape: Shape, placement: Placement) -> Buffers:
    """Memory for ops of ``shape``, and what all of them are coded by, so that the library can do it alone."""
    b, scratch = Buffers(shape, placement, job.rank, job.ranks), job.threads.scratch
    switched = job.switched(placement.owner_map)
    coding = Coding(0, None if switched else job.weights, job.config.rotate)
    encode.lay(b.coding, shape, coding, b.contributions, b.scales, scratch.width)
    decode.lay(b.decoding, received(job, b, switched=switched), shape.results, coding, scratch.width)
    if not switched:
        mean.lay(b.words, job.records.ring, b.mine[True], shape, coding, b.results, scratch)
    b.bursts = tuple(map(job.queue.pacer.largest, (b.stamp.stride, b.given.stride)))
    b.encodes = job.threads.work(encode.encode_at, ctypes.addressof(b.coding), shape.groups)
    b.decodes = job.threads.work(decode.decode_at, ctypes.addressof(b.decoding), shape.groups)
    return b


def lay_own(job: Job, op: Op) -> None:
    """Writes down what the own rows are coded and sent by, so that the library can do it alone (``tb_launch``).

    Where others have to be asked or told first, where a device codes, or where something follows, Python does it.
    """
    launch = op.launch
    assert launch is not None
    if not plain(job, launch):
        return
    b, shape, coding = op.buffers, op.place.layout.shape, coding_of(job, op)
    encode.lay_op(b.coding, launch.data, shape, coding)
    if op.own:
        lay_results(job, op, own_present=True)
    op.code = b.encodes.again()


def plain(job: Job, launch: Launch) -> bool:
    """Whether the library alone can code and send the own rows of an op."""
    simple = launch.coder is HOST and launch.contribute and launch.prepare is None and launch.residual is None
    return simple and job.switch is None and not job.self_misses


def lay_results(job: Job, op: Op, *, own_present: bool) -> None:
    """Writes down what the results of the own rows are made and sent by, so that the library can do it alone."""
    b, coding = op.buffers, coding_of(job, op)
    sums = Sums(job.records.ring, op.sum_seq, job.cookie, op.label)
    mean.lay_op(b.words, sums, b.mine[own_present], coding, b.results)
    b.given.belong(op.place, coding.key)
    op.aim_at(job.channels.aims())
    op.mean = ctypes.addressof(b.words)


def received(job: Job, b: Buffers, *, switched: bool) -> Received:
    """Where the results of an op with buffers ``b`` are read from."""
    switch = job.config.switch
    sums = switched and switch is not None and switch.form == "sums"
    return b.received(job.records.result_rows, b.row_count if sums else NO_COUNTS)


def lay_decoding(job: Job, op: Op) -> None:
    """Writes down what the results are decoded by, so that the library can do it alone; a device does it itself."""
    launch, b, shape = op.launch, op.buffers, op.place.layout.shape
    assert launch is not None
    if launch.coder is not HOST:
        return
    rows = received(job, b, switched=op.switched)
    decode.lay_op(b.decoding, rows, shape.results, coding_of(job, op), launch.out)
    op.decode = b.decodes.again()


def _prepared(op: Op) -> Launch:
    """The launch, whose data can be read from now on."""
    launch = op.launch
    assert launch is not None
    if launch.prepare is not None:
        launch.prepare()
        launch.prepare = None
    return launch


def _encode(job: Job, op: Op) -> None:
    assert op.launch is not None
    op.coding, op.code = op.coding or job.now(), 0
    b, shape, coding = op.buffers, op.place.layout.shape, coding_of(job, op)
    made = op.launch.coder.encode(op.launch.data, shape, coding, b.contributions, b.scales, job.threads)
    if made is None:
        op.sending, op.begun = Sending.CODING, job.now()
        return
    if not made.finite:
        op.outcome.abstained = op.outcome.overflowed = op.empty = True
        job.counters["abstained"] += 1
        _done_sending(job, op)
        return
    op.outcome.clipped = made.clipped
    job.self_misses = 0
    if op.switched:
        op.own_present, op.own_in, op.sending = not op.outcome.late, job.now(), Sending.OVER
        switched.send(job, op)
        op.given = b.stamp.packets
    else:
        if op.own and not op.sealed:
            lay_results(job, op, own_present=True)
        if core().fast.tb_send_own(ctypes.addressof(job.owner), ctypes.addressof(op), job.now()):
            raise MemoryError("no memory for own rows")
        job.queue.pump(job.now())
    if op.launch.residual is not None:
        _keep_residual(job, op, op.launch.residual, coding)


def _keep_residual(job: Job, op: Op, residual: Values, coding: Coding) -> None:
    """What the own codes leave unsaid, once they are on their way."""
    assert op.launch is not None
    b, launch = op.buffers, op.launch
    shape, own = op.place.layout.shape, read_back(b.contributions, b.source, b.row_scale)
    launch.coder.write_residual(launch.data, own, b.scales, shape, coding, residual, job.threads)


def _done_sending(job: Job, op: Op) -> None:
    """Nothing of this rank's own comes in this op; all are told."""
    op.sending = Sending.OVER
    job.send_own(op, [])
    job.announce(op, job.peers)


_DO: dict[Do, Callable[[Job, Op], None]] = {
    Do.ABSTAIN: _abstain,
    Do.STAY_OUT: _stay_out,
    Do.MEASURE: _measure,
    Do.TELL: _tell,
    Do.AGREE: _agree,
    Do.ENCODE: _encode_first,
    Do.ENCODE_LATE: _encode_late,
    Do.COLLECT: _encode,
}
