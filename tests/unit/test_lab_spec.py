"""The strings of ``tailbound lab run``, the shape of a lab, its slow rank, its output and what it says at the end."""

from __future__ import annotations

import queue
import signal
from collections.abc import Callable
from itertools import islice, repeat
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tailbound.errors import ConfigError
from tailbound.settings.kinds import parse_rate
from tailbound_lab.lab import inject
from tailbound_lab.lab.faults import Fault
from tailbound_lab.lab.spec import Burst, LabSpec, Straggler, parse_burst, parse_probability, parse_straggler
from tailbound_lab.lab.straggler import ENVIRONMENT, Freezer, run_times, step_delay

READ: dict[Callable[[str], object], dict[str, object]] = {
    parse_rate: {
        "1gbit": 10**9, "2.5Gbit": 2_500_000_000, "500 mbit": 5 * 10**8, "800kbit/s": 800_000, "9000bit": 9000,
    },
    parse_probability: {"0": 0.0, "0.01": 0.01, "1%": 0.01, " 12.5% ": 0.125, "1e-3": 0.001},
    parse_burst: {"0.01": Burst(0.01, 5.0), "2%:8": Burst(0.02, 8.0)},
    parse_straggler: {
        "3:40": Straggler(3, 40.0, 160.0), "0:2.5:100": Straggler(0, 2.5, 100.0), "1:40:step": Straggler(1, 40.0, None),
    },
}  # fmt: skip
REFUSED: dict[Callable[[str], object], tuple[str, list[str]]] = {
    parse_rate: ("rate", ["", "1", "1gbps", "-1gbit", "7kbit", "1tbit", "nanbit"]),
    parse_probability: ("probability", ["", "one", "1", "100%", "-0.1", "nan"]),
    parse_burst: ("burst", ["0.01:", "0.01:0", "0.01:x", "2:4", ":4", "0.01:4:4", "0.01:inf"]),
    parse_straggler: ("straggler", ["", "3", "x:40", "-1:40", "3:0", "3:40:20", "3:40:often", "1:2:3:4", "1:nan"]),
}


@pytest.mark.parametrize("parse", READ)
def test_strings_are_read_or_refused_by_name(parse: Callable[[str], object]) -> None:
    assert {text: parse(text) for text in READ[parse]} == READ[parse]
    named, wrong = REFUSED[parse]
    for text in wrong:
        with pytest.raises(ConfigError, match=named):
            parse(text)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"workers": 0}, "workers"), ({"workers": 257}, "workers"), ({"loss": 1.0}, "loss"),
        ({"duplicate": -0.1}, "duplicate"), ({"corrupt": float("nan")}, "corrupt"), ({"burst": Burst(1.5)}, "burst"),
        ({"burst": Burst(0.1, 0.5)}, "burst"), ({"rate": 1}, "rate"), ({"mtu": 100}, "MTU"), ({"mtu": 65536}, "MTU"),
        ({"port": 0}, "port"), ({"port": 65536}, "port"), ({"straggler": Straggler(4, 1.0, None)}, "straggler rank 4"),
    ],
)  # fmt: skip
def test_a_spec_that_cannot_be_is_refused(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LabSpec(**{"workers": 4, **settings})  # type: ignore[arg-type]


def test_only_the_named_rank_sleeps_and_only_if_it_is_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, delays in (("2:40:step", [0.0, 0.0, 0.04, 0.0]), ("2:40:160", [0.0] * 4), ("", [0.0] * 4)):
        monkeypatch.setenv(ENVIRONMENT, text) if text else monkeypatch.delenv(ENVIRONMENT)
        assert [step_delay(rank) for rank in range(4)] == delays


@pytest.mark.parametrize(("seconds", "signals"), [(0.0005, 6), (1000.0, 1)])
def test_a_freezer_stops_and_continues_in_turn_and_leaves_the_group_running(seconds: float, signals: int) -> None:
    sent: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    freezer = Freezer(77, seconds, repeat(0.0005), signal_group=lambda *said: sent.put(said))
    found = [sent.get(timeout=20) for _ in range(signals)]
    freezer.close()
    found += [sent.get_nowait() for _ in range(sent.qsize())]
    assert found == [(77, signal.SIGSTOP), (77, signal.SIGCONT)] * (len(found) // 2)


def test_running_times_follow_the_seed_and_the_mean() -> None:
    def times(seed: int, n: int) -> list[float]:
        return list(islice(run_times(Straggler(0, 40, 200), seed), n))

    assert times(1, 50) == times(1, 50) != times(2, 50)
    assert sum(times(3, 4000)) / 4000 == pytest.approx(0.160, rel=0.05)


def test_a_packet_between_two_workers_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both cables saw it, and 5 % of loss were told as 2.58 %."""
    counts = {"seen": 1000, "lost": 25}
    monkeypatch.setattr(inject, "FaultProgram", lambda: Mock(counts=lambda: counts))
    monkeypatch.setattr(inject.namespaces, "call", lambda *_, **__: None)
    cables = [SimpleNamespace(rank=rank) for rank in range(2)]
    topology: Any = SimpleNamespace(cables=cables, cable_ends=lambda *_: [("", ""), ("", "")])
    made = inject.Injector(topology, Fault(loss=0.05), 1)
    assert str(made.counts(link=inject.LINKS[0])) == (
        "of 2000 packets 100 lost (5.00 %); 0 duplicated, 0 corrupted, 0 reordered"
    )
