"""Requests, answers and greetings of anybody, with the job's key and without (``soak.tcp``). Rules: auth-3, auth-6."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from soak import tcp

_MANY = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=[b"", tcp.KEY], ids=["no key", "key"], scope="module")
def both(request: pytest.FixtureRequest) -> Iterator[tcp.Pair]:
    with tcp.pair(request.param) as made:
        yield made


@given(drawn=tcp.REQUESTS)
@_MANY
def test_what_is_no_request_reaches_no_handler(both: tcp.Pair, drawn: Any) -> None:
    both.request(drawn)


@given(drawn=tcp.ANSWERS)
@_MANY
def test_what_is_no_answer_is_an_error_that_says_so(both: tcp.Pair, drawn: Any) -> None:
    both.answer(drawn)


@given(drawn=tcp.SAID)
@settings(max_examples=300)
def test_what_is_no_greeting_is_refused_by_name(drawn: Any) -> None:
    tcp.greeting(drawn)
