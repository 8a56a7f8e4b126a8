"""Where a job's switch is: addresses, slots, forms, cookies, and what is refused; and when it is left."""

from __future__ import annotations

import pytest

from support import MemoryStore
from tailbound.collective.communicator import Communicator
from tailbound.errors import ConfigError
from tailbound.settings.table import OPTIONS
from tailbound.transport.config import MS, Config
from tailbound.transport.switch import RESTS, Fallback, Switch, parse


@pytest.mark.parametrize(
    ("text", "switch"),
    [
        ("10.0.0.1", Switch("10.0.0.1")),
        ("10.0.0.1:77", Switch("10.0.0.1", 77)),
        ("198.18.252.1,rows=1024,form=sums", Switch("198.18.252.1", rows=1024, form="sums")),
        ("fd00::1,cookie=0x7a11b0de", Switch("fd00::1", cookie=0x7A11B0DE)),
        ("[fd00::1]", Switch("fd00::1")),
        ("[fd00::1]:77,codes=512", Switch("fd00::1", 77, codes=512)),
    ],
)
def test_one_text_says_where_it_is_and_what_it_holds(text: str, switch: Switch) -> None:
    assert parse(text) == OPTIONS["switch"].read({"TAILBOUND_SWITCH": text}) == switch


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("switch.example", "IP address in numbers"),
        ("10.0.0.1:door", "job add"),
        ("[fd00::1]door", "IP address in numbers"),
        ("fd00::1,form=sums", "that one is for IPv4"),
        ("10.0.0.1:70000", "70000"),
        ("10.0.0.1,rows=1000", "power of two"),
        ("10.0.0.1,form=median", "mean, sums"),
        ("10.0.0.1,cookie=4294967296", "cookie"),
        ("10.0.0.1,cookie=cake", "job add"),
        ("10.0.0.1,slots=64", "job add"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OPTIONS["switch"].parse(text, "switch=")


def test_sums_need_two_bytes_a_code() -> None:
    assert Switch("10.0.0.1", form="sums").width(1408) == 704
    assert Switch("10.0.0.1").width(1408) == 1408
    with pytest.raises(ConfigError, match="too small"):
        Switch("10.0.0.1", form="sums").width(64)


def test_a_switch_may_take_narrower_rows_than_packets_have_room_for() -> None:
    where = Switch("10.0.0.1", form="sums", codes=512)
    assert (where.width(1408), where.width(256)) == (512, 128)
    assert Switch("10.0.0.1", codes=512).width(1408) == 512
    with pytest.raises(ConfigError, match="multiple of 64"):
        Switch("10.0.0.1", codes=500)


def test_a_job_and_its_switch_are_at_most_256_ranks() -> None:
    Config(rank=0, ranks=255, switch=Switch("10.0.0.1"))
    with pytest.raises(ConfigError, match="256 workers and their switch"):
        Config(rank=0, ranks=256, switch=Switch("10.0.0.1"))


def test_the_datapath_switch_needs_to_know_its_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAILBOUND_SWITCH", raising=False)
    with pytest.raises(ConfigError, match="TAILBOUND_SWITCH"):
        Communicator(MemoryStore(), Config(rank=0, ranks=2), datapath="switch")


def test_a_silent_switch_is_left_and_tried_again_ever_more_seldom() -> None:
    fallback, now = Fallback(after=3), 0
    assert fallback.update(2, True, now)
    assert not fallback.update(3, True, now)
    rests = []
    for _ in range(9):
        left = now
        while not fallback.update(3, False, now):
            now += 100 * MS
        rests.append(now - left)
        assert fallback.update(5, True, now)  # silent from before: does not count twice
        assert not fallback.update(6, True, now)
    assert rests[0] == RESTS.first
    assert rests[1] == 2 * RESTS.first
    assert rests[-1] == RESTS.most


def test_a_switch_that_went_on_for_long_is_trusted_again() -> None:
    fallback = Fallback(after=3)
    fallback.update(3, True, 0)
    assert fallback.update(3, False, RESTS.first)
    fallback.update(0, True, 10 * RESTS.first)
    assert not fallback.update(3, True, 20 * RESTS.first)
    assert fallback.update(3, False, 21 * RESTS.first)
