"""Settings that cannot be right are refused by name, before anything is opened."""

from __future__ import annotations

from typing import Any

import pytest

from tailbound.errors import ConfigError, TailboundError
from tailbound.transport.config import Config, row_width, width_for_mtu
from tailbound.transport.switch import Switch
from tailbound.wire.schema import IPV6_BYTES

SWITCH = Switch("198.18.0.9")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 4}, "rank 4 of world size 4: give 0..3"),
        ({"rank": -1}, "rank -1 of world size 4"),
        ({"ranks": 0}, r"world size 0: give 1..256"),
        ({"ranks": 257}, "world size 257"),
        ({"port": 65536}, "UDP port 65536"),
        ({"port": -1}, "UDP port -1"),
        ({"width": 100}, "width 100"),
        ({"width": -64}, "width -64"),
        ({"width": 9000}, "width 9000"),
        ({"ring_mib": 0}, "ring of 0 MiB"),
        ({"ring_mib": float("nan")}, "ring of nan MiB"),
        ({"deadline_1": -1}, "deadline_1 is -1 ns: give 0 or more"),
        ({"quiet": -5}, "quiet is -5 ns: give 0 or more"),
        (
            {"deadline_1": 60_000_000, "stage_max": 50_000_000},
            "deadline_ms is longer than 50 ms, the most that patience",
        ),
        ({"insist": -1}, "insist is -1 ns: give 0 or more"),
        ({"hold_max": 0}, "hold_max is 0 ns: give a time above 0"),
        ({"mtu": 100}, "MTU 100 is too small"),
        ({"authenticate": "yes"}, "auto, on, off"),
        ({"switch": SWITCH, "key_file": "/a"}, "has no key"),
    ],
)
def test_what_cannot_be_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Config(**({"rank": 0, "ranks": 4} | settings))
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, TailboundError)


@pytest.mark.parametrize(
    ("settings", "keyed"),
    [
        ({}, False),
        ({"key_file": "/a"}, True),
        ({"authenticate": "on"}, True),
        ({"key_file": "/a", "authenticate": "off"}, False),
        ({"switch": SWITCH, "key_file": "/a", "authenticate": "off"}, False),
    ],
)
def test_who_has_a_key(settings: dict[str, Any], keyed: bool) -> None:
    """Rule: auth-7."""
    assert Config(rank=0, ranks=2, **settings).keyed == keyed


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
        (62_219_904, 1408, 176.0),  # of half as many
        (7_000_000_000, 1408, 352.0),  # rings have a power of two of rows: the next size is above RING_MOST
        (7_000_000_000, 8896, 278.0),
    ],
)
def test_the_ring_follows_the_step(step: int, width: int, mib: float) -> None:
    assert Config(0, 2, step=step).ring(width) == mib
    assert Config(0, 2, step=step, ring_mib=400.0).ring(width) == 400.0


def test_width_for_mtu() -> None:
    assert [width_for_mtu(mtu) for mtu in (156, 576, 1499, 1500, 9000, 65535)] == [64, 448, 1344, 1408, 8896, 8896]
    for mtu in (0, 68, 155):
        with pytest.raises(ConfigError, match=f"MTU {mtu} is too small for one row: give at least 156"):
            width_for_mtu(mtu)


def test_rows_leave_room_for_the_longer_header_of_ipv6() -> None:
    assert (width_for_mtu(1500, IPV6_BYTES), width_for_mtu(1280, IPV6_BYTES)) == (1344, 1152)
    assert row_width(0, 9000, ip=IPV6_BYTES) == 8832
    assert row_width(0, 9000, linear=3520, ip=IPV6_BYTES) == 3392
    with pytest.raises(ConfigError, match="MTU 170 is too small for one row: give at least 176"):
        width_for_mtu(170, IPV6_BYTES)


@pytest.mark.parametrize(
    ("asked", "mtu", "linear", "width"),
    [
        (0, 1500, 3520, 1408),
        (0, 9000, None, 8896),
        (0, 9000, 3520, 3392),  # more would not lie in one page
        (0, 3498, 3520, 3392),
        (0, 9000, 3072, 2944),  # ice
        (0, 1500, 1472, 1344),  # enetc
        (1408, 9000, 3520, 1408),
        (1408, 576, 3520, 448),
        (0, None, None, 1408),
        (64, None, None, 64),
    ],
)
def test_rows_are_as_wide_as_the_path_takes(asked: int, mtu: int | None, linear: int | None, width: int) -> None:
    assert row_width(asked, mtu, linear=linear) == width
