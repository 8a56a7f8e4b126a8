"""What is taken of an answer to a question for lost results (clock-35)."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tailbound.codec.decode import MISSING
from tailbound.codec.owners import OwnerMap
from tailbound.codec.shape import shape_for
from tailbound.collective.fetched import Fetch
from tailbound.transport.sequence import Layout, Sequence
from tailbound.wire import packets
from tailbound.wire.schema import Flag, PacketType

RIGHT = {"layout": 7, "owner": 1, "count": 3, "row": 2, "map_id": 256}


@pytest.mark.parametrize(
    ("wrong", "rows"),
    [
        ({}, [2]), ({"map_id": 513}, []), ({"layout": 8}, []), ({"owner": 2}, []), ({"count": 0}, []), ({"row": 3}, []),
        ({"type": PacketType.CONTRIBUTION}, []), ({"op": 5}, []),
    ],
)  # fmt: skip
def test_only_rows_that_the_kernel_would_take_are_taken(wrong: dict[str, int], rows: list[int]) -> None:
    shape = shape_for(64 * 64, 64)
    place, _ = Sequence(3, OwnerMap(256, (0, 1, 2))).assign(Layout((0, 64 * 64, 0, 1), shape, 7, True))
    fetch = Fetch("deadline", 0, 1, {1: np.array([2, 4])})
    head = packets.header(**{"type": PacketType.RESULT, "op": place.label, **RIGHT, **wrong})
    fetch.arrived(place, 1, np.asarray(head).tobytes() + bytes(shape.codes))
    assert [places.tolist() for _, places, _ in fetch.came] == [rows]
    assert not fetch.waiting


def test_what_owners_say_of_an_op_counts_in_rows_that_were_fetched_too() -> None:
    """A rank that had lost all rows of an owner applied an op that this owner had told all to skip."""
    shape = shape_for(64 * 64, 64)
    place, _ = Sequence(3, OwnerMap(256, (0, 1, 2))).assign(Layout((0, 64 * 64, 0, 1), shape, 7, True))
    fetch = Fetch("deadline", 0, 1, {1: np.array([2])})
    head = packets.header(type=PacketType.RESULT, op=place.label, flags=int(Flag.SKIP), **RIGHT)
    fetch.arrived(place, 1, np.asarray(head).tobytes() + bytes(shape.codes))
    buffers: Any = SimpleNamespace(
        results=SimpleNamespace(packets=np.zeros((0, 64 + shape.codes), np.uint8)),
        source=np.full(shape.rows, MISSING), row_scale=np.zeros(shape.rows, np.float32),
        row_exponent=np.zeros(shape.rows, np.int16),
    )  # fmt: skip
    assert fetch.settle(place, buffers)[0] == 1
    assert fetch.flags == Flag.SKIP


@pytest.mark.parametrize("rows", [2, 20_000])
def test_who_does_not_answer_is_asked_a_second_time_where_little_is_asked_for(rows: int) -> None:
    """The first request is lost: nothing of it comes until TCP sends it again. Rule: clock-35."""
    from tailbound.collective import fetch

    lost, asked, taken = threading.Event(), queue.SimpleQueue[int](), queue.SimpleQueue[Any]()

    class Path:
        def __init__(self) -> None:
            self.ends: list[Any] = []

        def before_close(self, action: Any) -> None:
            self.ends.append(action)

        def runs(self, body: Any, name: str) -> None:
            threading.Thread(target=body, name=name, daemon=True).start()

        def pull(self, owner: int, *_: Any) -> bytes:
            asked.put(owner)
            if not lost.is_set():
                lost.set()
                released.wait(60)
                return b"late"
            return b"at once"

    def call(command: Any) -> None:
        taken.put(command.args[2])
        command()

    shape, released, path = shape_for(64 * 64, 64), threading.Event(), Path()
    place, _ = Sequence(3, OwnerMap(256, (0, 1, 2))).assign(Layout((0, 64 * 64, 0, 1), shape, 7, True))
    op = SimpleNamespace(place=place, finished=False, fetch=Fetch("deadline", 0, 1, {1: np.arange(rows)}))
    job = SimpleNamespace(ranks=3, rank=0, config=SimpleNamespace(fetch=1))
    ask = fetch.over(path, SimpleNamespace(job=job, call=call))  # type: ignore[arg-type]
    ask(op, 1, b"?", 60_000_000_000)  # type: ignore[arg-type]
    assert asked.get(timeout=60) == 1
    if rows == 2:
        assert taken.get(timeout=60) == b"at once"
        assert not op.fetch.waiting
    released.set()
    assert taken.get(timeout=60) == b"late"
    for end in path.ends:
        end()
    assert asked.qsize() == (rows == 2)
