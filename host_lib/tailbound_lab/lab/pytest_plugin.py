"""A pytest fixture that builds labs and removes them: ``tailbound_lab``.

::

    def test_two_workers(tailbound_lab):
        lab = tailbound_lab(workers=2, loss=0.01)
        assert lab.run(0, function) == 42

Installed with the package (entry point ``pytest11``). Without root or namespaces the test is skipped and
the reason names the capability.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tailbound_lab.lab.cluster import Cluster
    from tailbound_lab.lab.spec import LabSpec


@pytest.fixture
def tailbound_lab() -> Iterator[Callable[..., Cluster]]:
    """A function that builds a lab from a LabSpec or its arguments; all are removed after the test."""
    # here, so that test runs that build no lab do not pay for netlink
    from tailbound.errors import CapabilityError
    from tailbound_lab.lab.cluster import Cluster
    from tailbound_lab.lab.spec import LabSpec

    with ExitStack() as labs:

        def make(spec: LabSpec | None = None, /, **settings: Any) -> Cluster:
            try:
                return labs.enter_context(Cluster(spec if spec is not None else LabSpec(**settings)))
            except CapabilityError as error:
                pytest.skip(f"missing capability: {error}")

        yield make
