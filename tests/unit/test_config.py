"""Settings that cannot be right are refused by name, before anything is opened."""

from __future__ import annotations

from typing import Any

import pytest

from tailbound.errors import ConfigError, TailboundError
from tailbound.transport.config import Config, Switch, row_width
from tailbound.wire.schema import IPV4_BYTES, IPV6_BYTES

SWITCH = Switch("198.18.0.9")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 4}, "rank 4 of world size 4: give 0..3"),
        ({"ranks": 0}, r"world size 0: give 1..256"),
        ({"ranks": 257}, "world size 257"),
        ({"deadline_1": 60, "stage_max": 50}, "deadline_ms is longer than 5e-05 ms, the most that patience"),
        ({"switch": SWITCH, "key_file": "/a"}, "has no key"),
    ],
)
def test_what_cannot_be_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Config(**({"rank": 0, "ranks": 4} | settings))
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, TailboundError)


def test_who_has_a_key() -> None:
    """Rule: auth-7."""
    assert [Config(0, 2, key_file=given).keyed for given in ("/a", "drawn", "")] == [True, True, False]
    assert not Config(0, 2, switch=SWITCH).keyed


def test_the_bound_is_that_of_the_rules() -> None:
    """Rules: clock-12, clock-35."""
    assert Config(0, 1, start_max=5, stage_max=10, deadline_1=1, deadline_2=1, quiet=1).bound == 25
    assert Config(0, 1, start_max=5, stage_max=10, insist=7).bound == 32


@pytest.mark.parametrize(
    ("step", "width", "mib"),
    [
        (0, 1408, 64.0),  # not known
        (10_000_000, 1408, 64.0),  # 64 MiB hold more than two steps
        (124_439_808, 1408, 352.0),  # 262,144 rows for steps of 88,381
        (124_439_808, 8896, 278.0),
        (7_000_000_000, 1408, 352.0),  # rings have a power of two of rows: the next size is above RING_MOST
    ],
)
def test_the_ring_follows_the_step(step: int, width: int, mib: float) -> None:
    assert Config(0, 2, step=step).ring(width) == mib
    assert Config(0, 2, step=step, ring_mib=400.0).ring(width) == 400.0


@pytest.mark.parametrize(
    ("asked", "mtu", "linear", "ip", "width"),
    [
        (0, 1500, 3520, IPV4_BYTES, 1408),
        (0, 1499, None, IPV4_BYTES, 1344),
        (0, 156, None, IPV4_BYTES, 64),
        (0, 9000, None, IPV4_BYTES, 8896),
        (0, 65535, None, IPV4_BYTES, 8896),
        (0, 9000, 3520, IPV4_BYTES, 3392),  # more would not lie in one page
        (0, 9000, 3072, IPV4_BYTES, 2944),  # ice
        (0, 1500, 1472, IPV4_BYTES, 1344),  # enetc
        (1408, 9000, 3520, IPV4_BYTES, 1408),
        (1408, 576, 3520, IPV4_BYTES, 448),
        (64, None, None, IPV4_BYTES, 64),
        (0, None, None, IPV4_BYTES, 1408),
        (0, 1500, None, IPV6_BYTES, 1344),  # room for the longer header
        (0, 9000, 3520, IPV6_BYTES, 3392),
    ],
)
def test_rows_are_as_wide_as_the_path_takes(
    asked: int, mtu: int | None, linear: int | None, ip: int, width: int
) -> None:
    assert row_width(asked, mtu, linear=linear, ip=ip) == width


@pytest.mark.parametrize(("mtu", "ip", "least"), [(155, IPV4_BYTES, 156), (0, IPV4_BYTES, 156), (170, IPV6_BYTES, 176)])
def test_an_mtu_that_holds_no_row_is_refused(mtu: int, ip: int, least: int) -> None:
    with pytest.raises(ConfigError, match=f"MTU {mtu} is too small for one row: give at least {least}"):
        row_width(0, mtu, ip=ip)
