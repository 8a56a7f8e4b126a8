"""Which interface `tailbound doctor` judges, by what MASTER_ADDR says of a host with one link."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tailbound.doctor.interfaces import leads_to_peers
from tailbound.lab.cluster import Cluster

pytestmark = pytest.mark.needs("root", "netns")


@pytest.mark.parametrize(
    ("master", "name", "why"),
    [
        ("{peer}", "data0", "the way to MASTER_ADDR"),
        ("127.0.1.1", None, "is this host, and no other network"),
        ("no-such-host.invalid", None, "no name that this host knows"),
    ],
)
def test_the_judged_interface_and_why(
    tailbound_lab: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, master: str, name: str | None, why: str
) -> None:
    lab = tailbound_lab(workers=2)
    monkeypatch.delenv("TAILBOUND_INTERFACE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", master.format(peer=lab.workers[1].address))
    judged, told = lab.run(0, leads_to_peers)
    assert judged == name
    assert why in told


def test_a_host_that_is_its_own_master_and_has_a_way_out(
    tailbound_lab: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's /etc/hosts has 127.0.1.1 for a host's own name; doctor said that it leads nowhere."""
    from pyroute2 import IPRoute

    lab = tailbound_lab(workers=2)

    def way_out() -> None:
        with IPRoute() as route:
            route.route("add", dst="default", gateway=lab.workers[1].address)

    lab.run(0, way_out)
    monkeypatch.delenv("TAILBOUND_INTERFACE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.1.1")
    judged, told = lab.run(0, leads_to_peers)
    assert judged == "data0"
    assert "is this host" in told
