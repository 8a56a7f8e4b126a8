"""Who compiles: clang alone where one is enough, since BCC takes longer; tests in namespaces take BCC's first."""

from __future__ import annotations

import pytest

_CLANG = pytest.mark.needs("bpf", "clang", "libbpf")
_BCC = pytest.mark.needs("bpf", "bcc", "headers")


@pytest.fixture(params=[pytest.param("clang", marks=_CLANG), pytest.param("bcc", marks=[_BCC, pytest.mark.thorough])])
def loader(request: pytest.FixtureRequest) -> str:
    """Who compiles the program."""
    return str(request.param)


#: Of a test that programs of both have to pass every day.
both_loaders = pytest.mark.parametrize(
    "loader", [pytest.param("bcc", marks=_BCC), pytest.param("clang", marks=_CLANG)], indirect=True
)
