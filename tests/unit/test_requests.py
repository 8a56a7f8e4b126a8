"""Requests of a fixed form, and one question to many peers at once."""

from __future__ import annotations

import struct
import threading

import pytest

from tailbound.errors import TransportError
from tailbound.transport.reliable import Refusal
from tailbound.transport.requests import ask_each, of_form


def test_a_request_of_another_size_is_refused() -> None:
    form = struct.Struct("!HI")
    handler = of_form(form, lambda one, two: [bytes([one + two])])
    assert list(handler(form.pack(3, 4))) == [bytes([7])]
    for request in (b"", form.pack(3, 4)[:-1], form.pack(3, 4) + b"x"):
        with pytest.raises(Refusal, match=f"a request of {len(request)} bytes"):
            handler(request)


def test_all_are_asked_at_once_and_who_says_nothing_is_left_out() -> None:
    asked = threading.Barrier(4, timeout=60)

    def ask(rank: int) -> str | None:
        asked.wait()
        if rank == 3:
            raise TransportError("nobody there")
        return None if rank == 5 else f"rank {rank}"

    assert ask_each([7, 3, 5, 1], ask, "asking") == {7: "rank 7", 1: "rank 1"}
    assert ask_each([], ask, "asking") == {}
