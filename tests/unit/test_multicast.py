"""The group of a job, a member that hears what is sent to it (on loopback, within this machine), and the trials."""

from __future__ import annotations

import ipaddress
import random
import select
import socket
from collections.abc import Collection

import pytest

from tailbound.errors import CapabilityError, ConfigError
from tailbound.transport.config import MS, Config
from tailbound.transport.multicast import (
    AGAIN,
    BEAT,
    ENOUGH,
    FEW,
    PATIENCE,
    RANGE,
    ROUND,
    WINDOW,
    Ears,
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


class Fabric:
    """One sender and its peers in virtual time; what is lost is up to the test."""

    def __init__(self, loss: float = 0.0) -> None:
        self.trials = Trials()
        self.ears = {peer: Ears() for peer in PEERS}
        self.loss = loss
        self.deaf: Collection[int] = ()
        self.mute: Collection[int] = ()
        self.now, self.tries = 1, 0
        self._random = random.Random(1)

    def _through(self) -> bool:
        return self._random.random() >= self.loss

    def until(self, end: int, live: Collection[int] = PEERS) -> None:
        """Turns at the times asked for; answers come a millisecond later."""
        while self.now < end and self.trials.failed is None:
            self.now = max(self.now, self.trials.due)
            numbers, asked = self.trials.turn(self.now, tuple(live))
            self.tries += len(numbers)
            for number in numbers:
                for peer in PEERS:
                    if peer not in self.deaf and self._through():
                        self.ears[peer].hear(0, number)
            for peer in asked:
                if peer not in self.mute and self._through() and self._through():
                    heard = self.ears[peer].answer(0, self.trials.number)
                    self.trials.answer(peer, self.trials.number, heard, self.now + MS)


def test_a_good_fabric_is_known_after_one_round_and_tried_now_and_then() -> None:
    fabric = Fabric()
    fabric.until(2 * BEAT)
    assert fabric.trials.reached == set(PEERS)
    assert fabric.tries == ROUND
    fabric.until(10 * AGAIN)
    assert 9 * ROUND <= fabric.tries <= 11 * ROUND


def test_many_ranks_are_tried_in_proportion_more_rarely() -> None:
    trials, live = Trials(), tuple(range(1, 8 * FEW + 1))
    trials.turn(0, live)
    assert trials.due == 8 * BEAT
    trials.turn(trials.due, live)
    for rank in live:
        trials.answer(rank, ROUND, (1 << ROUND) - 1, trials.due)
    due = trials.due
    trials.turn(due, live)
    assert trials.due == due + 8 * AGAIN


def test_lost_packets_do_not_end_it() -> None:
    fabric = Fabric(loss=0.1)
    fabric.until(20 * AGAIN)
    assert (fabric.trials.reached, fabric.trials.failed) == (set(PEERS), None)


def test_a_peer_that_hears_too_few_ends_it_and_may_have_just_joined() -> None:
    fabric = Fabric()
    fabric.deaf = (2,)
    fabric.until(PATIENCE // 2)
    assert (fabric.trials.reached, fabric.trials.failed) == ({1, 3}, None)
    fabric.deaf = ()
    fabric.until(PATIENCE)
    assert fabric.trials.reached == set(PEERS)
    fabric.deaf = (3,)
    fabric.until(PATIENCE + 2 * AGAIN + 2 * PATIENCE)
    assert fabric.trials.failed == 3
    assert fabric.trials.turn(fabric.now + 2 * AGAIN, PEERS) == (range(0), [])


def test_a_good_answer_makes_up_for_bad_ones_before_it() -> None:
    trials = Trials()
    trials.turn(0, (1,))
    later = 2 * PATIENCE
    for heard, now in ((0, 1), ((1 << ROUND) - 1, 2), (0, later), (0, later + PATIENCE - 1)):
        trials.answer(1, ROUND, heard, now)
    assert trials.failed is None
    trials.answer(1, ROUND, 0, later + PATIENCE)
    assert trials.failed == 1


def test_silence_says_nothing() -> None:
    fabric = Fabric()
    fabric.until(2 * BEAT)
    fabric.deaf = fabric.mute = (2,)
    fabric.until(5 * AGAIN)
    assert (fabric.trials.reached, fabric.trials.failed) == (set(PEERS), None)


@pytest.mark.parametrize(("heard", "good"), [(ENOUGH, True), (ENOUGH - 1, False)])
def test_enough_of_the_round_have_to_be_heard_and_other_rounds_do_not_count(heard: int, good: bool) -> None:
    trials = Trials()
    trials.turn(0, (1,))
    trials.answer(1, ROUND - 1, (1 << 64) - 1, 1)
    trials.answer(1, ROUND, (1 << heard) - 1 | ~0xFFFF & (1 << 64) - 1, 1)
    assert trials.reached == ({1} if good else set())


def test_ears_remember_a_window() -> None:
    ears = Ears()
    assert ears.answer(1, 9) == 0
    for number in (4, 5, 7):
        ears.hear(1, number)
    assert ears.answer(1, 7) == 0b1101
    assert ears.answer(1, 8) == 0b11010
    assert ears.answer(1, 5) == 0b11
    ears.hear(1, 6)
    assert ears.answer(1, 7) == 0b1111
    ears.hear(1, 7 + WINDOW)
    assert ears.answer(1, 7 + WINDOW) == 1
    assert ears.answer(1, 7 + 2 * WINDOW) == 0


def test_the_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="result"):
        Config(rank=0, ranks=2, result="each")  # type: ignore[arg-type]
    for group in ("10.0.0.1", "224.0.0.5", "all", "239.1.1"):
        with pytest.raises(ConfigError, match="multicast group"):
            Config(rank=0, ranks=2, group=group)
    assert Config(rank=0, ranks=2, group="239.1.2.3").group == "239.1.2.3"
