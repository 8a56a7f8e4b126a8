"""Every setting of Tailbound, once: its type, text, meaning and default.

A key of ``Options`` is an option of a job. It makes the keyword argument of ``TailboundState`` and ``register``, the
environment variable, the row of ``docs/settings.md`` (``make generate``) and the lines in the docstring. It also makes
the field of ``transport.config.Config`` that has its name. A key of ``Advanced`` does the same, but its argument is an
entry of ``advanced=``. An argument wins over the variable, the variable over the default; empty text is none.
"""

from __future__ import annotations

import difflib
import logging
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, TypedDict, get_args, get_type_hints

from tailbound.errors import ConfigError
from tailbound.observe import status, trace
from tailbound.settings.kinds import (
    BITS_KIND,
    DEADLINES,
    LIMITS,
    ON_OFF,
    PATIENCE,
    RATE,
    Kind,
    choice,
    integer,
    number,
    words,
)
from tailbound.transport.config import DEFAULT_PORT, GIVE_SWITCH, PORTS, AskedResult, Config, Limits, parse_switch
from tailbound.wire.bits import Bits

log = logging.getLogger("tailbound")
PREFIX = "TAILBOUND_"


@dataclass(frozen=True)
class Setting:
    """One variable.

    Attributes:
        variable: its name.
        kind: what may be given.
        doc: what it is, in one line.
        default: value where nothing is given.
        option: the argument of ``TailboundState``, or the entry of ``advanced=``; empty: there is none.
        otherwise: the default in words, where the value does not tell.
        convert: the value of the field of ``Config`` that has its name.
    """

    variable: str
    kind: Kind
    doc: str
    default: Any = None
    option: str = ""
    otherwise: str = ""
    convert: Callable[[Any], Any] = lambda value: value

    def read(self, environment: Mapping[str, str] = os.environ) -> Any:
        """The value in the environment, else the default.

        Raises:
            ConfigError: it cannot be; the message names variable and value, and says what to give.
        """
        text = environment.get(self.variable, "").strip()
        return self.parse(text, self.variable) if text else self.default

    def parse(self, text: str, name: str, given: str = "") -> Any:
        """The value that ``text`` stands for; ``name`` is what to call it in the message, ``given`` how to write it.

        Raises:
            ConfigError: it cannot be; the message names it and what was given, and says what to give.
        """
        try:
            return self.kind.parse(text.strip())
        except (ValueError, KeyError) as error:
            why = error if isinstance(error, ConfigError) else f"give {self.kind.give}"
            raise ConfigError(f"{name} is {given or repr(text)}: {why}") from None


def _option(kind: Kind, default: Any, doc: str, **more: Any) -> Setting:
    return Setting("", kind, doc, default, **more)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


class Advanced(TypedDict, total=False):
    """Options that hardly any job needs: entries of ``advanced=``."""

    # fmt: off
    deadline_ms: Annotated[tuple[float, float] | None, _option(
        DEADLINES, None, "longest waits for contributions and, after them, for results, ms", otherwise="learned",
    )]
    insist: Annotated[float | None, _option(
        number(0, inclusive=True), None,
        "seconds that an op asks for lost results at most past its deadline ([lost](torch/failures.md#lost-results))",
        otherwise="a twenty-sixth of `patience`",
    )]
    share_rows: Annotated[bool, _option(
        ON_OFF, True, "stragglers own no rows, by agreement",
    )]
    resync_period: Annotated[int, _option(integer(0), 200, "steps between two comparisons of digests; 0: none")]
    resync_share: Annotated[float, _option(
        number(0, inclusive=True), 0.05,
        "share of its time in which a rank that missed results takes another's state; 0: it takes none by itself",
    )]
    result: Annotated[AskedResult, _option(
        choice(*get_args(AskedResult)), "auto", "how averaged rows come to the other ranks ([transport](transport.md))",
    )]
    rate: Annotated[int, _option(
        RATE, 0,
        "speed of this rank's link, or its part of one that several ranks share: nothing is sent faster than that "
        "([transport](transport.md))",
        otherwise="what its driver says", convert=lambda bits: bits / 8,
    )]
    dscp: Annotated[int, _option(
        integer(0, 63), 0, "class of the job's packets, for switches that keep one apart",
    )]
    # fmt: on


class Options(TypedDict, total=False):
    """Options of a job, by name: the type, then everything else about it."""

    # fmt: off
    datapath: Annotated[str, _option(
        choice("auto", "xdp", "udp"), "auto", "how packets are received and summed; `auto`: `xdp` where it can be had "
        "on the interface, else `udp`",
    )]
    switch: Annotated[str | None, _option(
        Kind(GIVE_SWITCH, parse_switch), None, "switch on the way, which averages for this job", otherwise="none",
    )]
    interface: Annotated[str | None, _option(
        words("the name of an interface"), None,
        "network interface of this rank, or `eth0,eth1`: one for each rank of the host",
        otherwise="the way to MASTER_ADDR",
    )]
    port: Annotated[int, _option(
        integer(0, 65535), 0,
        f"first of {PORTS} UDP ports, for firewalls: `udp` takes one that is free, `xdp` has the one of its program",
        otherwise=f"any that is free; `xdp` and a switch's job: {DEFAULT_PORT}",
    )]
    mtu: Annotated[int, _option(
        integer(0, 65535), 0,
        "largest IP packet in bytes on the way between any two ranks, where a tunnel or another interface takes less",
        otherwise="that of the interface",
    )]
    ring_mib: Annotated[float | None, _option(
        number(above=0), None,
        "MiB of result rows kept ready to receive; bounds what is in flight, and who can catch up "
        "([large models](torch/large.md))",
        otherwise="two steps of the model, 64 to 512", convert=lambda mib: Config.ring_mib if mib is None else mib,
    )]
    safeguard: Annotated[Limits | None, _option(
        LIMITS, None, "fractions of an op's rows lost beyond which to skip it, or to stop",
        otherwise=f"skip={Limits.skip:g}", convert=lambda limits: limits or Limits(),
    )]
    timeout: Annotated[float, _option(number(above=0), 180.0, "seconds to wait for the other ranks at the start")]
    patience: Annotated[str | float, _option(
        PATIENCE, PATIENCE.parse("cloud"), "longest time of an op, when ranks or packets are missing: `rack` is 1.3 "
        "seconds, `cloud` 5.2, `wan` 26 ([patience](torch/options.md#patience))", otherwise="`cloud`",
    )]
    hold_max: Annotated[float, _option(
        number(above=0), 60.0, "seconds for which the others wait for a rank within `hold()`, and for its first step",
        convert=_nanoseconds,
    )]
    bits: Annotated[Bits, _option(
        BITS_KIND, 8, "bits of a code on the wire; 4,8: of contributions and of results ([options](torch/options.md))",
    )]
    error_feedback: Annotated[bool | None, _option(
        ON_OFF, None, "what rounding and clipping kept back comes with the next gradient",
        otherwise="with contributions of 4 bits",
    )]
    key_file: Annotated[str, _option(
        words("the path of a file, or drawn"), "",
        "file with the job's key, the same on all ranks: 32 bytes, or as many in hexadecimal digits; `drawn`: rank 0 "
        "draws one, and hands it over the store. Packets and requests without it are refused ([security](security.md))",
        otherwise="no key",
    )]
    advanced: Advanced
    # fmt: on


def _settings(options: type) -> dict[str, Setting]:
    hints = get_type_hints(options, include_extras=True).items()
    found = {name: hint.__metadata__[0] for name, hint in hints if hasattr(hint, "__metadata__")}
    return {name: replace(one, variable=PREFIX + name.upper(), option=name) for name, one in found.items()}


#: Options of a job, by name, and those of ``advanced=``.
OPTIONS, ADVANCED = _settings(Options), _settings(Advanced)
_OF_A_JOB = OPTIONS | ADVANCED
PORT, RESULT, BITS = OPTIONS["port"], ADVANCED["result"], OPTIONS["bits"]
NODE_GROUP = Setting(
    "TAILBOUND_NODE_GROUP", choice("auto", "off"),
    "ranks of a host share a bucket and send a part of it each "
    "([several ranks a host](torch/large.md#several-ranks-a-host)); `auto`: those that torchrun has started there",
    "off",
)  # fmt: skip
#: Everything else.
OTHERS = (
    NODE_GROUP,
    Setting(
        trace.TRACE_VARIABLE, words("a folder"), "folder into which every rank leaves a Chrome trace when it closes",
        otherwise="no trace",
    ),
    Setting(
        status.VARIABLE, words("a folder, or off"), "where status files for `tailbound top` go; `off`: nowhere",
        otherwise="`/run/tailbound-status` for root, else the user's runtime folder",
    ),
)  # fmt: skip

ALL = (*_OF_A_JOB.values(), *OTHERS)
#: Variables of the laboratory and of tests.
LABORATORY = ("TAILBOUND_LAB_", "TAILBOUND_BENCH_", "TAILBOUND_REQUIRE_ALL")
_told: set[str] = set()


def refuse_unknown(options: Mapping[str, Any]) -> None:
    """Raises a ``ConfigError`` for an option that is none, with the nearest one that is."""
    advanced = options.get("advanced") or {}
    if not isinstance(advanced, Mapping):
        raise ConfigError(f"advanced={advanced!r}: give a dictionary of options, as advanced={{'share_rows': False}}")
    for names, given in (OPTIONS, options), (ADVANCED, advanced):
        for name in given.keys() - names.keys() - {"advanced"}:
            if name in OPTIONS:
                raise ConfigError(f"{name}= is an argument of its own: give register(..., {name}={given[name]!r})")
            hint = f"give advanced={{{name!r}: ...}}" if name in ADVANCED else _hint(name, names, "{}")
            raise ConfigError(f"there is no option {name}= here: {hint}")


def _hint(name: str, names: Iterable[str], form: str) -> str:
    """What to give in place of ``name``: one of ``names``, written in a ``form``."""
    close = difflib.get_close_matches(name, names, 1, 0.8)
    return f"did you mean {form.format(close[0])}?" if close else "see docs/settings.md"


def known(option: str, options: Mapping[str, Any]) -> Any:
    """An option as ``TailboundState`` will have it: of ``options``, or of the environment, or by default.

    Text is a value wherever it is one in the environment: ``share_rows="off"``. None is not given.

    Raises:
        ConfigError: what cannot be its value.
    """
    setting = _OF_A_JOB[option]
    given = ((options.get("advanced") or {}) if option in ADVANCED else options).get(option)
    if given is None or (isinstance(given, str) and not given.strip()):
        return setting.read()
    if setting.kind.parse is str and not isinstance(given, str):
        raise ConfigError(f"{option}= is {given!r}: give {setting.kind.give}")
    value = setting.parse(setting.kind.show(given), f"{option}=", repr(given))
    return given if isinstance(given, bool | int | float | tuple) else value  # the text of a number is rounded


def filled(options: Options) -> dict[str, Any]:
    """All options by name, also those of ``advanced=``: what is left out comes from the environment, or is a default.

    Raises:
        ConfigError: an option that is none, or a value that cannot be. Of unknown variables it warns.
    """
    refuse_unknown(options)
    for warning in unknown():
        log.warning("%s", warning)
    return {name: known(name, options) for name in _OF_A_JOB}


def config_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``Config`` that ``filled`` options stand for, but for the ones that are made of several."""
    names = {field.name for field in fields(Config)} - {"switch", "insist"}
    found = {name: setting.convert(options[name]) for name, setting in _OF_A_JOB.items() if name in names}
    patience, insist = options["patience"], options["insist"]
    part = _nanoseconds(patience) // 26
    times = {"start_max": 5 * part, "stage_max": 10 * part, "floor": part // 20}
    return found | times | {"insist": part if insist is None else _nanoseconds(insist)}


def described() -> str:
    """Lines about each option for a docstring: meaning, what to give, default."""
    lines = []
    for name, setting in OPTIONS.items():
        default = setting.otherwise or setting.kind.show(setting.default)
        text = f"{name}: {setting.doc}. Give {setting.kind.give}. Default: {default}."
        lines.append(textwrap.fill(text, 116, initial_indent=" " * 8, subsequent_indent=" " * 12))
    return "\n".join(lines)


def unknown(environment: Mapping[str, str] = os.environ) -> list[str]:
    """What to say of variables that look like settings and are none, each once a process."""
    names = [s.variable for s in ALL]
    ours = {name for name in environment if name.startswith(PREFIX) and not name.startswith(LABORATORY)}
    found = sorted(ours.difference(names, _told))
    _told.update(found)
    bare = [name.removeprefix(PREFIX) for name in names]  # the prefix alone makes all of them alike
    hints = [_hint(name.removeprefix(PREFIX), bare, PREFIX + "{}") for name in found]
    return [f"{name} is no setting and does nothing: {hint}" for name, hint in zip(found, hints, strict=True)]
