"""What nogil code sees of a store: one record of addresses, and accessors that make arrays of them.

Two dozen arrays as arguments would cost more than summing a packet: every call would copy their descriptors and count
references. A record travels as one pointer. ``Tables`` keeps the memory alive; nogil code gets ``Tables.context``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from numba import from_dtype, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array
from numpy.typing import NDArray

from tailbound.datapath.native import Mutex, fence, write_under
from tailbound.wire import schema
from tailbound.wire.packets import DTYPES, dtype_of

#: Entries of the two queues; powers of two. An event that does not fit is a hint lost; a control packet is counted.
EVENT_QUEUE = 1024
CONTROL_QUEUE = 1024

#: Words of the state array.
EVENT_HEAD, EVENT_TAIL, EVENTS_LOST, CONTROL_HEAD, CONTROL_TAIL, CONTROLS_LOST = range(6)
STOP, KERNEL_DROPS = range(6, 8)
STATE_WORDS = 16

T = TypeVar("T")


def _bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """``dtype`` with f32 fields as u32: nogil code moves them, it never computes with them."""
    return np.dtype([(n, "=u4") if d[0] == np.float32 else (n, d[0]) for n, d in dtype.fields.items()])  # type: ignore[union-attr]


_HEAD = _bits(dtype_of(schema.HEADER))

#: All worker maps but the locks that one mutex stands for, and what a datapath has besides.
_MAPS = tuple(m.name for m in schema.WORKER_MAPS if m.mmap or m.name in ("slot_locks", "keys"))
_OWN = ("head", "scratch", "events", "controls", "control_lengths", "state", "mutex", "queue_mutex")
#: Addresses of all arrays, and the sizes that are not in the schema.
CONTEXT_DTYPE = np.dtype(
    [(name, "=u8") for name in (*_MAPS, *_OWN)]
    + [(name, "=i8") for name in ("width", "sum_rows", "result_rows", "key_words")]
)


class Tables:
    """The memory of a udp datapath: the arrays of ``store.allocate`` and its own queues.

    ``context`` (CONTEXT_DTYPE[1]) is what nogil code is given; it is valid as long as this object lives.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        result_rows, width = arrays["results"].shape
        packet_bytes = schema.HEADER_BYTES + width
        self.arrays = dict(arrays)
        self.mutex = Mutex()  #: held while a received buffer is taken in, and while slots are sealed
        self.queue_mutex = Mutex()  #: held while a queue is written or drained
        self.events = np.zeros((EVENT_QUEUE, 3), np.uint64)  # kind, op, ns
        self.controls = np.zeros((CONTROL_QUEUE, packet_bytes), np.uint8)
        self.control_lengths = np.zeros(CONTROL_QUEUE, np.int64)
        self.state = np.zeros(STATE_WORDS, np.int64)
        self._head = np.zeros(1, _HEAD)
        self._scratch = np.zeros(packet_bytes // 8, np.uint64)
        queues = (self.events, self.controls, self.control_lengths, self.state)
        own: tuple[Any, ...] = (self._head, self._scratch, *queues, self.mutex.words, self.queue_mutex.words)
        memory = self.arrays | dict(zip(_OWN, own, strict=True))
        self.context = np.zeros(1, CONTEXT_DTYPE)
        for name in (*_MAPS, *_OWN):
            self.context[name] = memory[name].ctypes.data
        self.context["width"], self.context["result_rows"] = width, result_rows
        self.context["sum_rows"] = arrays["sums"].shape[0]
        self.context["key_words"] = arrays["keys"].shape[1] // 8

    def seal(self, op: int, seq: int, rows: int) -> None:
        """Seals ``rows`` slots from row sequence ``seq`` up to ``op``; when it returns, nobody is adding."""
        sealed = self.arrays["slot_locks"]["sealed_op"]
        first = seq & (len(sealed) - 1)
        end = first + min(rows, len(sealed))
        write_under(self.mutex.address, sealed[first:end], int(op))
        if end > len(sealed):
            write_under(self.mutex.address, sealed[: end - len(sealed)], int(op))

    def put_key(self, epoch: int, key: NDArray[np.uint64]) -> None:
        """``key`` (``wire.tag``) is in force from now on, in the place of the one two epochs before."""
        place = self.arrays["keys"].view(np.uint64)[epoch % schema.KEY_EPOCHS, : len(key)]
        write_under(self.mutex.address, place, key)

    def fence(self) -> None:
        """Waits for the buffer in hand; the mutex is the barrier, on every architecture."""
        fence(self.mutex.address)

    def take_events(self) -> list[tuple[int, int, int]]:
        """Queued events (kind, op, ns), oldest first; the queue is empty afterwards."""
        return self._take(EVENT_HEAD, EVENT_QUEUE, lambda places: [tuple(e) for e in self.events[places].tolist()])

    def take_controls(self) -> list[bytes]:
        """Queued control packets, oldest first; the queue is empty afterwards."""
        controls, lengths = self.controls, self.control_lengths
        return self._take(CONTROL_HEAD, CONTROL_QUEUE, lambda at: [controls[i, : lengths[i]].tobytes() for i in at])

    def _take(self, head: int, size: int, read: Callable[[NDArray[np.int64]], list[T]]) -> list[T]:
        """Reads what is queued by its places; the word behind ``head`` in the state is the queue's tail.

        Nobody writes between tail and head, so that no lock is held meanwhile: the fences are the barriers.
        """
        end = int(self.state[head])
        fence(self.queue_mutex.address)
        found = read(np.arange(self.state[head + 1], end) & (size - 1))
        fence(self.queue_mutex.address)
        self.state[head + 1] = end
        return found


def _record(dtype: np.dtype[Any]) -> Any:
    """``f(address, index)``: the record at ``index`` of an array at ``address``, in place."""
    kind = from_dtype(dtype)

    @intrinsic
    def at(_: Any, address: Any, index: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            offset = builder.mul(args[1], args[1].type(dtype.itemsize))
            return builder.inttoptr(builder.add(args[0], offset), context.get_value_type(kind))

        return kind(types.uint64, types.int64), build

    return at


def _row(scalar: Any) -> Any:
    """``f(address, index, length)``: row ``index`` of a two-dimensional array of ``length`` columns at ``address``."""
    kind = types.Array(scalar, 1, "C")
    size = scalar.bitwidth // 8

    @intrinsic
    def at(_: Any, address: Any, index: Any, length: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            item = args[1].type(size)
            offset = builder.mul(args[1], builder.mul(args[2], item))
            array = make_array(kind)(context, builder)  # type: ignore[no-untyped-call]
            data = builder.inttoptr(builder.add(args[0], offset), array.data.type)
            shape = {"shape": (args[2],), "strides": (item,), "itemsize": item}
            populate_array(array, data=data, **shape, meminfo=None)  # type: ignore[no-untyped-call]
            return array._getvalue()

        return kind(types.uint64, types.int64, types.int64), build

    return at


#: In nogil code, ``t`` being the context: ``control_at(t.control, 0).cookie``, ``u64_row(t.sums, slot, t.width // 4)``.
control_at = _record(DTYPES["tb_control"])
peer_at = _record(DTYPES["tb_peer"])
peer_state_at = _record(DTYPES["tb_peer_state"])
expect_results_at = _record(DTYPES["tb_expect_results"])
slot_at = _record(DTYPES["tb_slot"])
slot_lock_at = _record(DTYPES["tb_slot_lock"])
result_at = _record(_bits(DTYPES["tb_result"]))
presence_at = _record(DTYPES["tb_presence"])
op_at = _record(DTYPES["tb_op"])
arrival_at = _record(DTYPES["tb_arrival"])
head_at = _record(_HEAD)
u8_row = _row(types.uint8)
i64_row = _row(types.int64)
u64_row = _row(types.uint64)
