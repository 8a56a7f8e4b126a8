"""The second part of ``make soak``: it runs, nothing that was ever found comes back, and it finds what is planted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from soak import corpus, packets
from soak.life import relive
from tailbound.wire.schema import Verdict


class Told:
    """What a part has told."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.found: list[str] = []

    def __call__(self, what: str, value: Any) -> None:
        if what == "found":
            self.found.append(value)
        elif isinstance(value, dict):
            self.counts.update(value)
        else:
            self.counts[what] += value


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def hunt(loader: str, told: Told, tmp_path: Path) -> Iterator[packets.Hunt]:
    hunting = packets.Hunt(loader, told, tmp_path)
    yield hunting
    hunting.close()


def test_lives_pass_and_packets_get_as_far_as_sums_and_results(hunt: packets.Hunt, told: Told) -> None:
    hunt.again()
    for seed in (5, 6, 7):  # jobs that are not active are drawn seldom
        hunt.one("worker", seed, lambda: False)
        hunt.one("switch", seed, lambda: False)
    assert told.found == []
    lives = hunt.twins.values()
    assert told.counts["packets"] == sum(int(t.counts.sum()) + t.foreign for t in lives) == 3 * 258 * (32 + 8)
    unseen = {verdict for verdict in Verdict if not told.counts[verdict.name]}
    assert unseen <= {
            Verdict.NOT_LINEAR, Verdict.FRAGMENT, Verdict.FLUSHED, Verdict.ABANDONED,
            Verdict.FORGED,  # of jobs with a key: soak.forged
        }  # fmt: skip
    before = [t.counts.tolist() for t in lives]
    hunt.one("worker", 0, lambda: True)
    assert before == [t.counts.tolist() for t in lives], "it goes on although its time is over"


@pytest.mark.parametrize("seed", [35601000198, 35600001634])
def test_spoilt_frames_leave_their_codes_where_nobody_reads(hunt: packets.Hunt, told: Told, seed: int) -> None:
    """A frame with a spoilt head may still be a packet with a wrong check, and its row one that is over (kernel-9)."""
    hunt.one("worker", seed, lambda: False)
    assert told.found == []


def _plant(hunt: packets.Hunt, patch: pytest.MonkeyPatch, what: str) -> str:
    """Breaks something; the program of which lives find it."""
    worker, switch = hunt.twins["worker"], hunt.twins["switch"]
    if what == "a seal that closes nothing":
        patch.setattr(worker.kernel.sealer, "seal", lambda *_: None)
        return "worker"
    if what == "a group that only one side knows":
        control = worker.kernel.control
        patch.setattr(worker.kernel, "control", lambda **values: control(**values | {"group": 0}))
        return "worker"
    begin = switch.begin

    def with_other_headroom() -> None:
        begin()
        for rules in switch.rules.values():
            rules.headroom += 1

    patch.setattr(switch, "begin", with_other_headroom)
    return "switch"


@pytest.mark.parametrize(
    ("what", "words", "most"),
    [
        ("a seal that closes nothing", "VERDICTS_DIFFER", 4),
        ("a group that only one side knows", "VERDICTS_DIFFER", 3),
        ("another headroom", "OTHER_RESULT", 3),
    ],
)
def test_what_is_planted_is_found_made_short_and_kept(
    hunt: packets.Hunt, told: Told, tmp_path: Path, what: str, words: str, most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        program = _plant(hunt, patch, what)
        for seed in range(40):
            hunt.one(program, seed, lambda: False)
            if told.found:
                break
        assert words in told.found[0], told.found
        ((path, steps),) = [life for life in corpus.kept(program, tmp_path) if life[0].parent == tmp_path]
        assert len(steps) <= most, steps
        assert relive(hunt.twins[program], steps).startswith(words)
        hunt.again()
        assert any(path.name in found for found in told.found[1:])
    told.found.clear()
    hunt.again()  # mended
    assert told.found == []


@pytest.mark.parametrize(
    ("array", "words"),
    [("ledger", "SPOILT_FRAME"), ("sums", "REFUSED_AND_SUMMED"), ("results", "REFUSED_AND_SHOWN")],
)
def test_a_program_that_writes_where_it_should_not_is_found(
    hunt: packets.Hunt, told: Told, tmp_path: Path, array: str, words: str
) -> None:
    """Once, between two batches; it cannot be had again from the packets, so it is told and not kept."""
    kernel = hunt.twins["worker"].kernel
    drain, memory = kernel.ring.drain, kernel.maps.arrays[array].view("u1").reshape(-1)

    written: list[bool] = []

    def and_write() -> Any:
        if kernel.ledger().any() and not written:  # not where a life begins
            written.append(True)
            memory[64 * 8 * (0 if array != "ledger" else 257 * hunt.cpu + 1)] += 1
        return drain()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel.ring, "drain", and_write)
        hunt.one("worker", 0, lambda: False)
    (found,) = told.found
    assert words in found
    assert not list(tmp_path.iterdir())


def test_making_a_life_short_keeps_what_it_takes() -> None:
    assert corpus.shortest(range(1000), lambda steps: {17, 902} <= set(steps)) == [17, 902]
    assert corpus.shortest([5], lambda steps: True) == [5]
