"""One table of settings: the hook's options, the documentation and the sources all agree with it."""

from __future__ import annotations

import inspect
import logging
import re
import subprocess
from pathlib import Path
from typing import Any, Unpack, cast, get_type_hints

import pytest

from tailbound.errors import ConfigError
from tailbound.settings import table as settings
from tailbound.settings.table import ADVANCED, ALL, OPTIONS, Options, config_fields, filled, unknown
from tailbound.transport.config import Config, Limits, Switch

#: Words of the sources that begin like a variable: a glob, the prefix itself.
NO_VARIABLES = {"TAILBOUND_", "TAILBOUND_NAME", "TAILBOUND_RNIG_MIB", "TAILBOUND_WEATHER"}


@pytest.mark.needs("torch")
def test_every_option_is_an_argument_with_a_line_in_the_docstring(repository: Path) -> None:
    from tailbound.torch import TailboundState, register
    from tailbound.torch.backend import BackendOptions

    for takes in (register, TailboundState.__init__, BackendOptions.__init__):
        assert get_type_hints(takes)[list(inspect.signature(takes).parameters)[-1]] == Unpack[Options]
    for name in OPTIONS:
        assert re.search(rf"^ +{name}: .*?Give\s.*?Default:\s", TailboundState.__doc__ or "", re.MULTILINE | re.DOTALL)
    table, advanced = (repository / "docs/torch/options.md").read_text().split("## DDP's")[0].split("| `advanced=")
    assert set(re.findall(r"`(\w+)`", table)) - {"register"} == OPTIONS.keys() | {"node_group"}
    assert re.findall(r"`(\w+)`", advanced) == [*ADVANCED]


def test_defaults_make_the_same_config_as_none() -> None:
    """But for what a job has otherwise than a simulation: results that were lost are insisted on."""
    assert Config(0, 2, **config_fields(filled({}))) == Config(0, 2, insist=200_000_000)


@pytest.mark.parametrize(
    ("patience", "more", "times"),
    [
        ("rack", {}, (250, 500, 2.5, 50)), ("cloud", {}, (1000, 2000, 10, 200)), ("WAN", {}, (5000, 10_000, 50, 1000)),
        (0.52, {}, (100, 200, 1, 20)), ("2.6", {"insist": 0}, (500, 1000, 5, 0)),
        ("26", {"insist": 0.5}, (5000, 10_000, 50, 500)),
    ],
)  # fmt: skip
def test_patience_is_the_longest_time_of_an_op(patience: Any, more: Any, times: tuple[float, ...]) -> None:
    found = config_fields(filled({"patience": patience, "advanced": more}))
    assert tuple(found[name] / 1e6 for name in ("start_max", "stage_max", "floor", "insist")) == pytest.approx(times)
    if not more:
        named = {"rack": 1.3, "cloud": 5.2, "WAN": 26}.get(patience, patience)
        assert Config(0, 2, **found).bound / 1e9 == pytest.approx(named)


def test_options_come_to_the_config_in_its_units() -> None:
    for rate in (25_000_000_000, 25e9, "25gbit"):
        found = config_fields(filled(cast(Options, {"hold_max": 1.5, "advanced": {"rate": rate}})))
        assert [found[name] for name in ("hold_max", "rate")] == [1_500_000_000, 3_125_000_000.0]


def test_every_variable_that_is_named_anywhere_is_in_the_table(repository: Path) -> None:
    """And each of the table is named somewhere else: nothing is documented that nobody reads."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=repository, capture_output=True,
                            text=True, check=False).stdout.split()  # fmt: skip
    paths = [repository / name for name in listed] or [p for p in repository.rglob("*") if p.suffix in (".py", ".md")]
    table = {"settings.py", "settings.md", "test_settings.py"}
    named: set[str] = set()
    for path in paths:
        if path.name not in table and path.is_file() and not path.is_symlink():
            named |= set(re.findall(r"\bTAILBOUND_[A-Z_]*", path.read_text(errors="replace")))
    variables = {s.variable for s in ALL}
    named = {name for name in named if not name.startswith(settings.LABORATORY)}
    assert named - NO_VARIABLES <= variables
    assert variables - {s.variable for s in (OPTIONS | ADVANCED).values()} <= named  # options are read by their names


def options(**given: Any) -> Any:
    """All settings of a caller who gives these, be they arguments or ``advanced``."""
    advanced = {name: given.pop(name) for name in ADVANCED if name in given}
    return filled(cast(Options, given | {"advanced": advanced}))


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("datapath", "UDP", "udp"),
        ("port", "0x4d", 77),
        ("ring_mib", "1.5", 1.5),
        ("deadline_ms", "20, 40", (20.0, 40.0)),
        ("deadline_ms", "learned", None),
        ("error_feedback", "0", False),
        ("share_rows", "Yes", True),
        ("patience", "Rack", 1.3),
        ("safeguard", "skip=never, stop=0.5", Limits(skip=None, stop=0.5)),
        ("resync_period", "0", 0),
        ("interface", " eth0 ", "eth0"),
        ("bits", "4, 8", (4, 8)),
        ("bits", "(4, 8)", (4, 8)),
        ("ring_mib", "  ", None),
    ],
)  # fmt: skip
def test_what_may_be_given_as_a_variable_and_as_an_argument(name: str, text: str, value: Any) -> None:
    setting = (OPTIONS | ADVANCED)[name]
    for found in (setting.read({setting.variable: text}), options(**{name: text})[name]):
        assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text", "give"),
    [
        *(("datapath", text, "one of auto, xdp, udp") for text in ("rdma", "switch")),
        *(("port", text, "a whole number of 0..65535") for text in ("70000", "five", "5.5")),
        *(("ring_mib", text, "a number above 0") for text in ("0", "nan", "inf")),
        *(("deadline_ms", text, "two numbers of milliseconds") for text in ("20", "20,0", "20,nan")),
        ("error_feedback", "maybe", "one of on, off"),
        ("bits", "8,4", "give one of 16 or 8 or 4,8"),
        *(("patience", text, "rack, cloud, wan, or seconds above 0") for text in ("lan", "0", "-1", "nan")),
        *(("safeguard", text, "NAME=VALUE,... of skip, stop") for text in ("warn=0.5", "skip", "skip=much")),
        ("safeguard", "skip=1.5", "give a fraction of 0..1"),
        ("resync_period", "-1", "a whole number of at least 0"),
        ("resync_share", "-0.5", "give 0 or more"),
        ("rate", "fast", "not a rate of 8kbit..400gbit: write"),
    ],
)
def test_a_wrong_value_is_named_with_its_variable_or_argument_and_what_to_give(name: str, text: str, give: str) -> None:
    setting = (OPTIONS | ADVANCED)[name]
    with pytest.raises(ConfigError, match=rf"^{setting.variable} is {text!r}: .*{re.escape(give)}"):
        setting.read({setting.variable: text})
    with pytest.raises(ConfigError, match=rf"^{name}= is {text!r}: .*{re.escape(give)}"):
        options(**{name: text})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"bit": 8}, "there is no option bit= here: did you mean bits?"),
        ({"colour": 8}, "there is no option colour= here: see docs/settings.md"),
        ({"result": "peers"}, "there is no option result= here: give advanced={'result': ...}"),
        ({"advanced": {"bits": 8}}, "bits= is an argument of its own: give register(..., bits=8)"),
        ({"advanced": {"resync_shares": 8}}, "there is no option resync_shares= here: did you mean resync_share?"),
    ],
)
def test_an_option_that_is_none_is_refused_with_what_to_give(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        filled(cast(Options, given))
    assert str(caught.value) == says


def test_an_argument_wins_over_the_variable_and_the_variable_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILBOUND_PORT", "2000")
    monkeypatch.setenv("TAILBOUND_SWITCH", "10.0.0.9")
    monkeypatch.delenv("TAILBOUND_RESULT", raising=False)
    assert [options()[name] for name in ("port", "switch", "result")] == [2000, Switch("10.0.0.9"), "auto"]
    limits = {"skip": None, "stop": 0.5}
    asked = options(port=3000, bits=16, error_feedback=False, deadline_ms=(1.0, 2.0), safeguard=limits)
    words = {"bits": "16", "error_feedback": "off", "deadline_ms": "1,2", "safeguard": "skip=never,stop=0.5"}
    assert (asked["port"], asked) == (3000, options(port="3000", **words))
    monkeypatch.setenv("TAILBOUND_RESULT", "fanout")
    assert options()["result"] == options(result=None)["result"] == "fanout"
    assert options(result="auto")["result"] == "auto"  # the default, but said: it wins
    monkeypatch.setenv("TAILBOUND_RESULT", "")
    assert options()["result"] == "auto"
    monkeypatch.setenv("TAILBOUND_PORT", "five")
    with pytest.raises(ConfigError, match="TAILBOUND_PORT is 'five': give"):
        options()
    assert options(port=3000)["port"] == 3000  # what is not needed is not read


def test_what_is_no_setting_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(settings, "_told", set())
    monkeypatch.setenv("TAILBOUND_RNIG_MIB", "2")
    with caplog.at_level(logging.WARNING, "tailbound"):
        options()
        options()
    assert [r.getMessage() for r in caplog.records] == [
        "TAILBOUND_RNIG_MIB is no setting and does nothing: did you mean TAILBOUND_RING_MIB?"
    ]
    ours = {"TAILBOUND_LAB_STRAGGLER": "1:5:2", "TAILBOUND_PORT": "1", "PATH": "/bin"}
    assert unknown(ours | {"TAILBOUND_WEATHER": "1"}) == [
        "TAILBOUND_WEATHER is no setting and does nothing: see docs/settings.md",
    ]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"patience": True}, "patience= is True: give rack"),
        ({"hold_max": float("inf")}, "hold_max= is inf"), ({"timeout": -1}, "timeout= is -1"),
        ({"safeguard": {"warn": 0.5}}, "safeguard= is {'warn': 0.5}: give NAME"),
        ({"interface": 3}, "interface= is 3: give the name of an interface"),
        ({"advanced": "rate"}, "advanced='rate': give a dictionary"),
        ({"advanced": {"deadline_ms": 20}}, "deadline_ms= is 20"),
        ({"advanced": {"deadline_ms": (0, 0)}}, "deadline_ms= is (0, 0)"),
        ({"advanced": {"resync_period": 1.5}}, "resync_period= is 1.5"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_refused_by_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        filled(cast(Options, given))
