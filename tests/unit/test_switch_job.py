"""Which jobs may share a switch: cookies, slots and ports, refused by name."""

from __future__ import annotations

import pytest

from tailbound.errors import ConfigError
from tailbound.kernel.switch import Entry, Member, port_table
from tailbound.switch.job import JobSpec, RankSpec, mac_bytes, parse_rank, place
from tailbound.wire.schema import SWITCH_JOBS

RANKS = (RankSpec("10.0.0.1", "02:00:00:00:00:01", "eth1"), RankSpec("10.0.0.2", "02:00:00:00:00:02", "eth2"))
SLOTS = 64


def entry(cookie: int, base: int, rows: int) -> Entry:
    member = Member("10.0.0.1", bytes(6), 7)
    return Entry(cookie, "10.0.0.9", bytes(6), 5515, base, rows, 4, (member,))


def spec(cookie: int = 9, rows: int = 16) -> JobSpec:
    return JobSpec(RANKS, cookie, rows=rows)


@pytest.mark.parametrize(
    ("there", "rows", "want"),
    [
        ({0: (0, 16)}, 16, (1, 16)),
        ({0: (16, 16)}, 16, (1, 0)),
        ({0: (0, 16), 2: (32, 16)}, 16, (1, 16)),
        ({1: (8, 16)}, 16, (0, 24)),
        ({1: (8, 16)}, 8, (0, 0)),
        ({0: (0, 32)}, 32, (1, 32)),
    ],
)
def test_room_is_found(there: dict[int, tuple[int, int]], rows: int, want: tuple[int, int]) -> None:
    entries = {number: entry(number + 1, *slots) for number, slots in there.items()}
    assert place(spec(rows=rows), entries, SLOTS) == want


@pytest.mark.parametrize(
    ("asked", "there", "words"),
    [
        (spec(cookie=5), {0: entry(5, 0, 16)}, "job 0x00000005 is in the switch already"),
        (spec(rows=128), {}, "128 slots for job 0x00000009: the switch has 64"),
        (spec(rows=32), {0: entry(5, 8, 32)}, r"no 32 free slots.*8..39 by 0x00000005"),
        (spec(), {n: entry(n + 20, n, 1) for n in range(SWITCH_JOBS)}, f"has {SWITCH_JOBS} jobs already"),
    ],
)
def test_refused(asked: JobSpec, there: dict[int, Entry], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        place(asked, there, SLOTS)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ranks": ()}, "give a job of a switch 1..255"),
        ({"cookie": 0}, "cookie 0x0: give"),
        ({"cookie": 1 << 32}, "give 1..0xffffffff"),
        ({"rows": 48}, "48 slots: give a power of two"),
        ({"port": 0}, "UDP port 0"),
        ({"headroom": -1}, "headroom -1"),
        ({"ranks": (RANKS[0], RANKS[0])}, "ranks 0 and 1 have the same address"),
        ({"ranks": (RANKS[0], RankSpec("10.0.0.3", RANKS[0].mac, "eth1"))}, "the same port eth1.*one worker a port"),
    ],
)
def test_specs_that_cannot_be(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        JobSpec(**({"ranks": RANKS, "cookie": 9} | fields))  # type: ignore[arg-type]


def test_ranks_as_they_are_written() -> None:
    assert parse_rank("10.0.0.1, 02:00:00:00:00:01,eth1") == RANKS[0]
    for text in (
        "10.0.0.1,eth1",
        "10.0.0.1,02:00:00:00:00:01,eth1,x",
        "10.0.0,02:00:00:00:00:01,eth1",
        "10.0.0.1,x,eth1",
    ):
        with pytest.raises(ConfigError):
            parse_rank(text)
    with pytest.raises(ConfigError, match="group"):
        mac_bytes("01:00:5e:00:00:01")


def test_every_port_has_a_place_in_the_table() -> None:
    assert port_table([1, 2, 3]) == 64
    assert port_table([1, 65]) == 128
    assert port_table([5, 5 + 64, 5 + 128]) == 256
    with pytest.raises(ConfigError, match="give each once"):
        port_table([5, 5])
