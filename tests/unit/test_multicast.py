"""The group of a job, and a member that hears what is sent to it (on loopback, within this machine)."""

from __future__ import annotations

import ipaddress
import select
import socket

import pytest

from tailbound.errors import CapabilityError, ConfigError
from tailbound.transport.multicast import RANGE, GroupMember, check_group, group_of, prepare
from tailbound.transport.reach import ROUND

ADDRESS = "127.0.0.1"


def anybody(data: bytes, source: str) -> bool:
    return True


def test_jobs_differ_and_stay_in_the_range() -> None:
    groups = {group_of(cookie) for cookie in (1, 2, 77, 0x7A11B0DE, 0xFFFFFFFF)}
    assert len(groups) == 5
    assert all(ipaddress.IPv4Address(group) in RANGE for group in groups)
    assert group_of(5, "239.7.7.7") == "239.7.7.7"


@pytest.mark.parametrize("given", ["198.18.0.1", "224.0.0.22", "255.255.255.255", "ff02::1", "group"])
def test_what_is_no_group_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"224\.0\.1\.0"):
        check_group(given)


def test_an_address_that_is_not_here_takes_no_members() -> None:
    with pytest.raises(CapabilityError, match="cannot be joined"):
        GroupMember(group_of(3), 0, "192.0.2.1", anybody)


def test_a_member_hears_the_group_and_nothing_once_it_is_closed() -> None:
    member = GroupMember(group_of(9), 0, ADDRESS, anybody)
    port = member.socket.getsockname()[1]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.bind((ADDRESS, 0))
        prepare(sender, ADDRESS)
        assert sender.getsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP) == 0
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)  # the only way to oneself
        sender.sendto(b"one", (member.group, port))
        assert select.select([member.socket], [], [], 5)[0]
        assert member.packets() == [b"one"]
        assert member.packets() == []
    member.close()
    member.close()
    assert member.packets() == []


@pytest.mark.needs("root")
def test_a_member_that_is_busy_loses_none_of_the_trials_of_64_ranks() -> None:
    trials = [bytes([number >> 8, number & 255]) * 32 for number in range(63 * ROUND)]
    member = GroupMember(group_of(10), 0, ADDRESS, anybody)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        prepare(sender, ADDRESS)
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
        for trial in trials:
            sender.sendto(trial, (member.group, member.socket.getsockname()[1]))
    heard: list[bytes] = []
    while len(heard) < len(trials) and select.select([member.socket], [], [], 5)[0]:
        heard += member.packets()
    member.close()
    assert heard == trials
