"""Who compiles, where the daily tests take clang alone: BCC's programs take longer, and other tests have them."""

from __future__ import annotations

import pytest


@pytest.fixture(
    params=[
        pytest.param("clang", marks=pytest.mark.needs("bpf", "clang", "libbpf")),
        pytest.param("bcc", marks=[pytest.mark.needs("bpf", "bcc", "headers"), pytest.mark.thorough]),
    ]
)
def loader(request: pytest.FixtureRequest) -> str:
    """Who compiles the program; namespaces (``tests/netns/test_ipv6.py``) take BCC's first."""
    return str(request.param)
