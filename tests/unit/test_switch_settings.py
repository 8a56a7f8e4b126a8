"""Where a job's switch is, which jobs may share it, when it is left; the list of the reference switch (kernel-24)."""

from __future__ import annotations

import contextlib

import pytest

from reference_switch import Rules
from switch_cases import Form, cases, expected
from tailbound.collective.maps import RESTS, Fallback
from tailbound.errors import ConfigError
from tailbound.kernel.switch import Entry, Member, port_table
from tailbound.settings.table import OPTIONS
from tailbound.switch.job import JobSpec, RankSpec, parse_rank, place
from tailbound.transport.config import MS, Config, Switch, parse_switch
from tailbound.wire.schema import SWITCH_JOBS, Verdict


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
    assert parse_switch(text) == OPTIONS["switch"].read({"TAILBOUND_SWITCH": text}) == switch


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
        ("10.0.0.1,codes=500", "multiple of 64"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OPTIONS["switch"].parse(text, "switch=")


@pytest.mark.parametrize(
    ("where", "room", "codes"),
    [
        (Switch("10.0.0.1"), 1408, 1408),
        (Switch("10.0.0.1", form="sums"), 1408, 704),  # two bytes a code
        (Switch("10.0.0.1", form="sums", codes=512), 1408, 512),
        (Switch("10.0.0.1", form="sums", codes=512), 256, 128),
        (Switch("10.0.0.1", codes=512), 1408, 512),
    ],
)
def test_rows_are_as_wide_as_packets_and_the_switch_have_room_for(where: Switch, room: int, codes: int) -> None:
    assert where.width(room) == codes


def test_a_job_is_as_large_as_its_switch_can_take() -> None:
    Config(rank=0, ranks=255, switch=Switch("10.0.0.1"))
    with pytest.raises(ConfigError, match="256 workers and their switch"):
        Config(rank=0, ranks=256, switch=Switch("10.0.0.1"))
    with pytest.raises(ConfigError, match="too small"):
        Switch("10.0.0.1", form="sums").width(64)


def test_a_silent_switch_is_left_and_tried_again_ever_more_seldom() -> None:
    fallback, now, rests = Fallback(after=3), 0, list[int]()
    assert fallback.update(2, True, now)
    assert not fallback.update(3, True, now)
    for _ in range(9):
        left = now
        while not fallback.update(3, False, now):
            now += 100 * MS
        rests.append(now - left)
        assert fallback.update(5, True, now)  # silent from before: does not count twice
        assert not fallback.update(6, True, now)
    assert (rests[:2], rests[-1]) == ([RESTS.first, 2 * RESTS.first], RESTS.most)


def test_a_switch_that_went_on_for_long_is_trusted_again() -> None:
    fallback = Fallback(after=3)
    fallback.update(3, True, 0)
    assert fallback.update(3, False, RESTS.first)
    fallback.update(0, True, 10 * RESTS.first)
    assert not fallback.update(3, True, 20 * RESTS.first)
    assert fallback.update(3, False, 21 * RESTS.first)


RANKS = (RankSpec("10.0.0.1", "02:00:00:00:00:01", "eth1"), RankSpec("10.0.0.2", "02:00:00:00:00:02", "eth2"))
SLOTS = 64


@pytest.mark.parametrize(
    ("there", "rows", "want"),
    [
        ({0: (0, 16)}, 16, (1, 16)),
        ({0: (16, 16)}, 16, (1, 0)),
        ({0: (0, 16), 2: (32, 16)}, 16, (1, 16)),
        ({1: (8, 16)}, 16, (0, 24)),
        ({1: (8, 16)}, 8, (0, 0)),
        ({0: (0, 32)}, 32, (1, 32)),
        ({8: (0, 16)}, 16, "job 0x00000009 is in the switch already"),
        ({}, 128, "128 slots for job 0x00000009: the switch has 64"),
        ({4: (8, 32)}, 32, r"no 32 free slots.*8..39 by 0x00000005"),
        ({n: (n, 1) for n in range(SWITCH_JOBS)}, 16, f"has {SWITCH_JOBS} jobs already"),
    ],
)
def test_room_is_found_or_refused(there: dict[int, tuple[int, int]], rows: int, want: tuple[int, int] | str) -> None:
    """``there``: slots of jobs in the switch, whose cookies are one more than their numbers."""
    member = Member("10.0.0.1", bytes(6), 7)
    entries = {n: Entry(n + 1, "10.0.0.9", bytes(6), 5515, *slots, 4, (member,)) for n, slots in there.items()}
    refusal = pytest.raises(ConfigError, match=want) if isinstance(want, str) else contextlib.nullcontext()
    with refusal:
        assert place(JobSpec(RANKS, 9, rows=rows), entries, SLOTS) == want


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
    mac = "02:00:00:00:00:01"
    for text in ("10.0.0.1,eth1", f"10.0.0.1,{mac},eth1,x", f"10.0.0,{mac},eth1", "10.0.0.1,x,eth1",
                 "10.0.0.1,01:00:5e:00:00:01,eth1"):  # fmt: skip
        with pytest.raises(ConfigError):
            parse_rank(text)


def test_every_port_has_a_place_in_the_table() -> None:
    assert [port_table(ports) for ports in ([1, 2, 3], [1, 65], [5, 5 + 64, 5 + 128])] == [64, 128, 256]
    with pytest.raises(ConfigError, match="give each once"):
        port_table([5, 5])


#: Addresses are its socket's business; it has one job, and knows all its ranks.
_ELSEWHERE = {None, Verdict.WRONG_ADDRESS}
CASES = [
    c
    for c in cases()
    if len(c.jobs) == 1 and c.jobs[0].registered is None and not {s.verdict for s in c.steps} & _ELSEWHERE
]


@pytest.mark.parametrize("form", ["mean", "sums"])
def test_the_reference_switch_does_what_the_list_says(form: Form) -> None:
    assert len(CASES) > 30
    for case in CASES:
        (job,) = case.jobs
        rules = Rules(job.cookie, job.ranks, job.headroom, job.rows, form)
        for step in case.steps:
            abandoned = rules.counts[Verdict.ABANDONED]
            verdict, out, everybody = rules.take(step.packet)
            assert verdict == step.verdict, case.name
            assert rules.counts[Verdict.ABANDONED] - abandoned == step.abandoned, case.name
            wanted = expected(step, form)
            assert (out or None) == wanted, case.name
            if wanted is not None:
                assert step.to == (tuple(range(job.ranks)) if everybody else (step.packet[14],)), case.name
