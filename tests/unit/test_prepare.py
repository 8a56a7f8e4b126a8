"""Compiling ahead, in a process of its own."""

from __future__ import annotations

import pytest

from tailbound import prepare
from tailbound.errors import TransportError


def test_a_process_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare.sys, "executable", "/bin/false")
    with prepare.Preparation() as preparation, pytest.raises(TransportError, match="two ranks on loopback"):
        preparation.wait()
