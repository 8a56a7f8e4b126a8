"""The group of a job, and its members."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from tailbound.errors import CapabilityError, ConfigError
from tailbound.transport.config import Config
from tailbound.transport.multicast import RANGE, check_group, group_of, join
from tailbound.transport.sockets import UdpSocket

ADDRESS = "127.0.0.1"


def test_jobs_differ_and_stay_in_the_range() -> None:
    groups = {group_of(cookie) for cookie in (1, 2, 77, 0x7A11B0DE, 0xFFFFFFFF)}
    assert len(groups) == 5
    assert all(ipaddress.IPv4Address(group) in RANGE for group in groups)
    assert group_of(5, "239.7.7.7") == "239.7.7.7"


@pytest.mark.parametrize("given", ["198.18.0.1", "224.0.0.22", "255.255.255.255", "ff02::1", "group"])
def test_what_is_no_group_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"224\.0\.1\.0"):
        check_group(given)


def test_an_address_that_is_not_here_takes_no_members(bound: UdpSocket) -> None:
    with pytest.raises(CapabilityError, match="cannot be joined"):
        join(bound, group_of(3), "192.0.2.1")


def test_a_member_sends_to_others_alone(bound: UdpSocket) -> None:
    join(bound, group_of(9), ADDRESS)
    assert bound.getsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP) == 0
    with pytest.raises(CapabilityError, match="in use"):  # it is a member already
        join(bound, group_of(9), ADDRESS)


def test_the_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="result"):
        Config(rank=0, ranks=2, result="each")  # type: ignore[arg-type]
    for group in ("10.0.0.1", "224.0.0.5", "all", "239.1.1"):
        with pytest.raises(ConfigError, match="multicast group"):
            Config(rank=0, ranks=2, group=group)
    assert Config(rank=0, ranks=2, group="239.1.2.3").group == "239.1.2.3"
