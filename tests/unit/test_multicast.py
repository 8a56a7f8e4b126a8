"""The group of a job, a member that hears what is sent to it (on loopback, within this machine), and the trials."""

from __future__ import annotations

import ipaddress
import select
import socket

import pytest

from tailbound.errors import CapabilityError, ConfigError
from tailbound.transport.config import MS, Config
from tailbound.transport.multicast import (
    BEAT,
    ENOUGH,
    FEW,
    PATIENCE,
    RANGE,
    ROUND,
    GroupMember,
    Trials,
    check_group,
    group_of,
    prepare,
)

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


PEERS = (1, 2, 3)
GOOD = dict.fromkeys(PEERS, ENOUGH)


def tried(trials: Trials, until: int, heard: dict[int, int], live: tuple[int, ...] = PEERS) -> list[int]:
    """Turns at the times asked for until ``until``; peers answer at once. The times of rounds."""
    now, rounds = trials.due, []
    while now < until and trials.failed is None:
        send, asked = trials.poll(now, live)
        rounds += [now] if send else []
        for rank in [rank for rank in asked if rank in heard]:
            trials.answer(rank, trials.number - 1, ROUND, now)  # of a round before: says nothing
            trials.answer(rank, trials.number, heard[rank], now)
        now = max(now + MS, trials.due)
    return rounds


def test_a_good_fabric_is_tried_once_and_again_for_who_comes_back() -> None:
    trials = Trials()
    assert len(tried(trials, 5 * PATIENCE, GOOD)) == 1
    assert (trials.reached, trials.failed) == (set(PEERS), None)
    assert not tried(trials, 6 * PATIENCE, GOOD, (1, 2))
    assert trials.reached == {1, 2}
    assert len(tried(trials, 7 * PATIENCE, GOOD)) == 1
    assert trials.reached == set(PEERS)


@pytest.mark.parametrize(("peers", "beats"), [(3, 1), (FEW, 1), (8 * FEW, 8)])
def test_many_ranks_are_tried_in_proportion_more_rarely(peers: int, beats: int) -> None:
    trials = Trials()
    tried(trials, 1, {}, tuple(range(1, peers + 1)))
    assert trials.due == beats * BEAT


def test_a_peer_that_goes_on_hearing_too_few_ends_it_and_may_have_just_joined() -> None:
    trials = Trials()
    tried(trials, PATIENCE, GOOD | {2: ENOUGH - 1})
    assert (trials.reached, trials.failed) == ({1, 3}, None)
    tried(trials, PATIENCE + 2 * BEAT, GOOD)
    assert trials.reached == set(PEERS)
    trials = Trials()
    tried(trials, 3 * PATIENCE, GOOD | {2: ENOUGH - 1})
    assert trials.failed == 2
    assert PATIENCE < trials.due < PATIENCE + 4 * BEAT
    assert trials.poll(9 * PATIENCE, PEERS) == (False, [])


def test_a_rank_that_comes_back_may_have_just_joined_too() -> None:
    """What the process before it had not heard does not count against it."""
    trials = Trials()
    trials.poll(0, PEERS)
    trials.answer(2, trials.number, ENOUGH - 1, 0)
    trials.poll(PATIENCE, [1, 3])
    trials.poll(2 * PATIENCE, PEERS)
    trials.answer(2, trials.number, ENOUGH - 1, 2 * PATIENCE)
    assert trials.failed is None


def test_silence_says_nothing() -> None:
    trials = Trials()
    tried(trials, 5 * PATIENCE, {1: ENOUGH, 3: ENOUGH})
    assert (trials.reached, trials.failed) == ({1, 3}, None)


def test_the_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="result"):
        Config(rank=0, ranks=2, result="each")  # type: ignore[arg-type]
    for group in ("10.0.0.1", "224.0.0.5", "all", "239.1.1"):
        with pytest.raises(ConfigError, match="multicast group"):
            Config(rank=0, ranks=2, group=group)
    assert Config(rank=0, ranks=2, group="239.1.2.3").group == "239.1.2.3"
