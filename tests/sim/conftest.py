"""Thousands of warnings of silent ranks say nothing, but to a test that reads them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_log(request: pytest.FixtureRequest) -> Iterator[None]:
    if "caplog" not in request.fixturenames:
        logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
