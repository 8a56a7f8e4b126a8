"""The choice between ways, as a table; and what may be asked for."""

from __future__ import annotations

import dataclasses

import pytest

from tailbound.errors import ConfigError
from tailbound.transport.choose import WORKS, Facts, Tried, choose, worth_trying
from tailbound.transport.config import Config

ALL = Facts(4, "xdp", fanout=WORKS, multicast=WORKS, unreached=())
NO_TC = {"fanout": Tried(False, "no privilege")}


@pytest.mark.parametrize(
    ("wanted", "facts", "result", "why"),
    [
        ("auto", {}, "fanout", "this kernel clones bursts"),
        ("auto", NO_TC, "peers", "no fan-out: no privilege"),
        ("auto", {"fanout": None, "multicast": None}, "peers", "not tried"),
        ("auto", {"ranks": 2}, "peers", "no two peers"),
        ("auto", {"datapath": "udp"}, "peers", "udp"),
        ("peers", {}, "peers", "asked for"),
        ("fanout", {}, "fanout", "asked for"),
        ("fanout", {"multicast": None}, "fanout", "asked for"),
        ("fanout", NO_TC, "peers", "no privilege"),
        ("fanout", {"datapath": "udp"}, "peers", "udp"),
        ("fanout", {"ranks": 2}, "peers", "no two peers"),
        ("multicast", {}, "multicast", "delivers"),
        ("multicast", {"unreached": None}, "fanout", "being tried"),
        ("multicast", {"unreached": (2, 3)}, "fanout", "does not reach 2, 3"),
        ("multicast", {"multicast": Tried(False, "no route")}, "fanout", "no multicast: no route"),
        ("multicast", {"unreached": (2,), **NO_TC}, "peers", "multicast does not reach 2; no fan-out: no privilege"),
        ("multicast", {"datapath": "udp"}, "peers", "udp"),
    ],
)
def test_the_table(wanted: str, facts: dict[str, object], result: str, why: str) -> None:
    choice = choose(wanted, dataclasses.replace(ALL, **facts))  # type: ignore[arg-type]
    assert (choice.collective, choice.result) == ("transpose", result)
    assert why in choice.reason


@pytest.mark.parametrize("wanted", ["auto", "peers", "fanout", "multicast"])
def test_a_switch_sends_the_results_itself(wanted: str) -> None:
    choice = choose(wanted, dataclasses.replace(ALL, switch=True))
    assert (choice.collective, choice.result) == ("switch", "peers")


def test_only_what_may_be_chosen_is_tried() -> None:
    assert worth_trying("auto", 4, "xdp") == (True, False)
    assert worth_trying("fanout", 4, "xdp") == (True, False)
    assert worth_trying("multicast", 4, "xdp") == (True, True)
    assert worth_trying("peers", 4, "xdp") == (False, False)
    assert worth_trying("auto", 2, "xdp") == (False, False)
    assert worth_trying("multicast", 4, "udp") == (False, False)


def test_the_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="result"):
        Config(rank=0, ranks=2, result="each")  # type: ignore[arg-type]
    for group in ("10.0.0.1", "224.0.0.5", "all", "239.1.1"):
        with pytest.raises(ConfigError, match="multicast group"):
            Config(rank=0, ranks=2, group=group)
    assert Config(rank=0, ranks=2, group="239.1.2.3").group == "239.1.2.3"
