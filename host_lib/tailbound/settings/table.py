"""Every environment variable of Tailbound, in one table: what it is, what may be given, who sets it.

Options of ``tailbound.torch.TailboundState`` have one each, named like the option. An argument wins over the variable,
the variable over the default; an empty variable is none. ``docs/settings.md`` is this table (``make generate``).
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from tailbound.errors import ConfigError
from tailbound.observe import status, trace
from tailbound.settings.kinds import (
    BITS_KIND,
    DEADLINES,
    GROUP,
    LIMITS,
    RATE,
    Kind,
    choice,
    integer,
    number,
    on_off,
    words,
)
from tailbound.transport import choose, switch
from tailbound.transport.config import AUTHENTICATE, DEFAULT_PORT, DSCP_MOST, PORTS, SOURCE_PORTS_MOST
from tailbound.wire.schema import WIDTH_STEP

P = ParamSpec("P")
R = TypeVar("R")
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
        option: the argument of ``TailboundState`` that it stands for; empty: there is none.
        otherwise: the default in words, where the value does not tell.
        set_by: who sets it.
        later: read further down, where it is known whether it is needed; never filled in as an argument.
    """

    variable: str
    kind: Kind
    doc: str
    default: Any = None
    option: str = ""
    otherwise: str = ""
    set_by: str = "you"
    later: bool = False

    def read(self, environment: Mapping[str, str] = os.environ) -> Any:
        """The value in the environment, else the default.

        Raises:
            ConfigError: it cannot be; the message names variable and value, and says what to give.
        """
        text = environment.get(self.variable, "").strip()
        return self.parse(text, self.variable) if text else self.default

    def parse(self, text: str, name: str) -> Any:
        """The value that ``text`` stands for; ``name`` is what to call it in the message.

        Raises:
            ConfigError: it cannot be; the message names it and the text, and says what to give.
        """
        try:
            return self.kind.parse(text.strip())
        except ValueError as error:
            why = f": {error}" if isinstance(error, ConfigError) else f": give {self.kind.give}"
            raise ConfigError(f"{name} is {text!r}{why}") from None


def _option(name: str, kind: Kind, default: Any, doc: str, **more: Any) -> Setting:
    return Setting(PREFIX + name.upper(), kind, doc, default, name, **more)


PORT = _option(
    "port", integer(0, 65535), 0,
    f"first of {PORTS} UDP ports, for firewalls: `udp` takes one that is free, `xdp` has the one of its program",
    otherwise=f"any that is free; `xdp` and a switch's job: {DEFAULT_PORT}",
    set_by="you, the lab, `tailbound switch job add`",
)  # fmt: skip
RESULT = _option(
    "result", choice(*choose.RESULTS), "auto", "how averaged rows come to the other ranks ([transport](transport.md))"
)
BITS = _option(
    "bits", BITS_KIND, 8,
    "bits of a code on the wire; 4,8: of contributions and of results ([options](torch/options.md))",
)  # fmt: skip
BALANCE = _option(
    "balance", on_off(), False,
    "small tensors keep their precision beside large ones: powers of two by tensor, by agreement "
    "([options](torch/options.md))",
)  # fmt: skip
#: Port of rank 0's metrics on a host; local rank k takes the k-th after it.
PROMETHEUS_PORT = Setting(
    "TAILBOUND_PROMETHEUS_PORT", integer(0, 65535),
    "port at which `tailbound.metrics.prometheus.serve` answers, plus the local rank; 0: any that is free", 9464,
)  # fmt: skip

#: Options of ``TailboundState``, in its order.
OPTIONS = (
    _option("datapath", choice("auto", "xdp", "udp", "switch"), "auto", "how packets are received and summed"),
    _option(
        "switch", words("ADDRESS, ADDRESS:PORT or [IPV6]:PORT"), None,
        "where the job's switch is, with `datapath=switch`",
        set_by="you, the lab, `tailbound switch job add`", otherwise="none", later=True,
    ),
    _option(
        "interface", words("the name of an interface"), None,
        "network interface of this rank, or `eth0,eth1`: one for each rank of the host",
        set_by="you, the lab", otherwise="the way to MASTER_ADDR",
    ),
    PORT,
    _option(
        "mtu", integer(0, 65535), 0, "largest IP packet in bytes on the way between any two ranks",
        otherwise="that of the interface",
    ),
    _option(
        "ring_mib", number(above=0), None,
        "MiB of result rows kept ready to receive; bounds what is in flight, and who can catch up "
        "([large models](torch/large.md))",
        otherwise="two steps of the model, 64 to 512",
    ),
    _option(
        "deadline_ms", DEADLINES, None, "longest waits for contributions and, after them, for results, ms",
        otherwise="learned",
    ),
    _option("hadamard", on_off("auto"), True, "rotate, so that losses are spread thinly; `auto`: while there are any"),
    _option(
        "safeguard", LIMITS, None, "fractions of an op's rows lost beyond which to skip it, or to stop",
        otherwise="those of `transport.safeguard.Limits`",
    ),
    _option("timeout", number(above=0), 180.0, "seconds to wait for the other ranks at the start"),
    _option(
        "start_max", number(above=0), 1.0,
        "seconds that an op waits at least for a majority to begin it too ([patience](torch/hook.md#patience))",
    ),
    _option(
        "stage_max", number(above=0), 2.0,
        "seconds that either half of an op takes at most, and in the first ops of a size",
    ),
    _option(
        "floor_ms", number(above=0), 10.0,
        "shortest deadline of a half, ms, and what lost tails cost with it: less for fast networks and idle cores "
        "([simulation](simulate.md#the-goal-and-what-it-takes))",
    ),
    _option(
        "strict", number(0, inclusive=True), 0.0,
        "seconds that an op waits for every row before its deadlines begin ([strict](torch/hook.md#strict))",
    ),
    _option(
        "fetch", number(0, inclusive=True), 0.2,
        "seconds that an op waits at most for lost results to come over TCP ([lost](torch/hook.md#lost-results))",
    ),
    _option(
        "hold_max", number(above=0), 60.0,
        "seconds for which the others wait for a rank within `hold()`, and for its first step",
    ),
    _option("share_rows", on_off(), True, "stragglers and slow links own fewer rows or none, by agreement"),
    BALANCE,
    BITS,
    _option(
        "fine_steps", integer(0), 0, "the first so many steps have codes of 16 bits ([options](torch/options.md))"
    ),
    _option(
        "error_feedback", on_off(), None, "what rounding and clipping kept back comes with the next gradient",
        otherwise="with contributions of 4 bits",
    ),
    _option("resync_period", integer(0), 200, "steps between two comparisons of digests; 0: none"),
    _option(
        "resync_share", number(0, inclusive=True), 0.05,
        "share of a step that a rank that missed results waits for a slice of another's state; 0: it takes none",
    ),
    RESULT,
    _option(
        "source_ports", integer(0, SOURCE_PORTS_MOST), 0,
        "source ports of what is sent to one rank, `xdp` only ([transport](transport.md)); 0: by the number of ranks",
    ),
    _option(
        "rate", RATE, 0,
        "speed of this rank's link, or its part of one that several ranks share: nothing is sent faster than that "
        "([transport](transport.md))",
        otherwise="what its driver says",
    ),
    _option("dscp", integer(0, DSCP_MOST), 0, "class of the job's packets, for switches that keep one apart"),
    _option(
        "multicast_group", GROUP, "", "IPv4 group of the job, the same on all ranks",
        otherwise="follows from the job's cookie",
    ),
    _option(
        "authenticate", choice(*AUTHENTICATE), "auto",
        "refuse packets and requests that were not made with the job's key ([security](security.md)); `auto`: where "
        "there is a key file; `workers`: all but those to and from the switch, which has none",
    ),
    _option(
        "key_file", words("the path of a file"), "",
        "file with the job's key, the same on all ranks: 32 bytes, or as many in hexadecimal digits",
        otherwise="with `authenticate=on` rank 0 draws one, and hands it over the store",
    ),
    _option(
        "codec_threads", integer(0), 0, "threads that code an op ([hook](torch/hook.md)); 0: one for each four cores",
    ),
)  # fmt: skip

NODE_GROUP = Setting(
    "TAILBOUND_NODE_GROUP", choice("auto", "off"),
    "ranks of a host share a bucket and send a part of it each ([several ranks a host](torch/nodes.md)); `auto`: those "
    "that torchrun has started there", "off",
)  # fmt: skip
DEVICE_CODEC = Setting(
    "TAILBOUND_DEVICE_CODEC", choice("auto", "triton", "torch"),
    "what codes buckets on a device ([GPU](torch/gpu.md)): kernels of Triton, or operations of torch; `auto`: Triton's "
    "on CUDA devices where it can be imported", "auto",
)  # fmt: skip
_SWITCH = "the lab, `tailbound switch job add`"
_P4_SWITCH = "`tailbound switch job add`, for the workers of a P4 switch"
SWITCH_ROWS = Setting(switch.ROWS, integer(1), "slots of the job in the switch", switch.Switch.rows, set_by=_SWITCH)
SWITCH_FORM = Setting(
    switch.FORM, choice(*switch.FORMS), "what the switch sends: means (XDP switch), or sums (P4 switch)",
    switch.Switch.form, set_by=_P4_SWITCH,
)  # fmt: skip
SWITCH_CODES = Setting(
    switch.CODES, integer(0), f"widest row that the switch takes, a multiple of {WIDTH_STEP}; 0: what packets hold",
    switch.Switch.codes, set_by="`tailbound switch job add`",
)  # fmt: skip
COOKIE = Setting(
    switch.COOKIE, integer(1, (1 << 32) - 1), "cookie that the switch knows the job by", 0, set_by=_SWITCH,
    otherwise="drawn by rank 0",
)  # fmt: skip
#: Everything else.
OTHERS = (
    NODE_GROUP,
    DEVICE_CODEC,
    SWITCH_ROWS,
    SWITCH_FORM,
    SWITCH_CODES,
    COOKIE,
    Setting(
        trace.TRACE_VARIABLE, words("a folder"), "folder into which every rank leaves a Chrome trace when it closes",
        otherwise="no trace",
    ),
    Setting(
        status.VARIABLE, words("a folder, or off"), "where status files for `tailbound top` go; `off`: nowhere",
        otherwise="`/run/tailbound-status` for root, else the user's runtime folder",
    ),
    PROMETHEUS_PORT,
    Setting(
        "TAILBOUND_LAB_STRAGGLER", words("RANK:MS:EVERY"),
        "extra milliseconds a step of one rank, read by `tailbound_lab.lab.straggler`",
        set_by="the lab", otherwise="nobody is late",
    ),
    Setting(
        "TAILBOUND_LAB_REFUSED", words("text"), "why the kernel refused a lab of its own to a user who is not root",
        set_by="the lab", otherwise="it did not",
    ),
    Setting("TAILBOUND_BENCH_REPORT", words("a number"), "file descriptor for a worker's reports", set_by="benchmarks"),
    Setting("TAILBOUND_BENCH_PARENT", words("a process id"), "process with which a worker ends", set_by="benchmarks"),
    Setting("TAILBOUND_REQUIRE_ALL", words("1"), "a skipped test is a failure", set_by="continuous integration"),
)  # fmt: skip

ALL = (*OPTIONS, *OTHERS)
_told: set[str] = set()
#: What could be given once, and what to do in its place.
_REMOVED = (
    ("late", "late gradients are left out; strict=SECONDS waits for them, so that none is late. Leave late= out"),
    ("schedule", "every average is applied in its own step. Leave schedule= out"),
    ("resync_drift", "a rank that misses results is made equal again at once. Leave resync_drift= out"),
)


def refuse_removed(options: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> None:
    """Raises a ``ConfigError`` for an option, or its variable, that is none any more; it says what to do."""
    for name, advice in _REMOVED:
        variable = PREFIX + name.upper()
        for place, found in ((f"{name}=", options.get(name)), (variable, environment.get(variable) or None)):
            if found is not None:
                raise ConfigError(f"{place} is {found!r}: {advice}")


def refuse_unknown(options: Mapping[str, Any], function: Callable[..., object]) -> None:
    """Raises a ``ConfigError`` for an option that ``function`` does not take, with the nearest one that it does."""
    names = inspect.signature(function).parameters
    for name in options:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {close[0]}=?" if close else "docs/settings.md has all options"
            raise ConfigError(f"{name}= is no option: {hint}")


def from_environment(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates what takes options of the table: those that the caller leaves out come from the environment.

    Text is an argument's value wherever it is one in the environment: ``hadamard="off"``. The decorated function raises
    ``ConfigError`` for a value that cannot be, and warns of unknown variables.
    """
    taken = inspect.signature(function).parameters
    settings = [s for s in OPTIONS if s.option in taken and not s.later]

    @functools.wraps(function)
    def filled(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_removed(kwargs)
        refuse_unknown(kwargs, function)
        for warning in unknown():
            log.warning("%s", warning)
        for setting in settings:
            given = kwargs.get(setting.option)
            if isinstance(given, str) and given.strip():
                kwargs[setting.option] = setting.parse(given, f"{setting.option}=")
            elif setting.option not in kwargs and os.environ.get(setting.variable, "").strip():
                kwargs[setting.option] = setting.read()
        return function(*args, **kwargs)

    return filled


def known(option: str, options: Mapping[str, Any]) -> Any:
    """An option as ``TailboundState`` will have it: of ``options``, or of the environment, or by default.

    Raises:
        ConfigError: text that is no value of it.
    """
    setting = next(setting for setting in OPTIONS if setting.option == option)
    given = options.get(option, "")
    if isinstance(given, str):
        return setting.parse(given, f"{option}=") if given.strip() else setting.read()
    return given


def unknown(environment: Mapping[str, str] = os.environ) -> list[str]:
    """What to say of variables that look like settings and are none, each once a process."""
    names = [s.variable for s in ALL]
    found = [n for n in environment if n.startswith(PREFIX) and n not in names and n not in _told]
    _told.update(found)
    said = []
    for name in sorted(found):
        close = difflib.get_close_matches(name, names, 1, 0.85)  # the prefix alone makes all of them alike
        hint = f"did you mean {close[0]}?" if close else "docs/settings.md has all settings"
        said.append(f"{name} is no setting and does nothing: {hint}")
    return said


def switch_of(address: str | None, environment: Mapping[str, str] = os.environ) -> switch.Switch:
    """The switch at ``address`` (``ADDRESS``, ``ADDRESS:PORT`` or ``[IPV6]:PORT``; default ``TAILBOUND_SWITCH``).

    Raises:
        ConfigError: none is named, or a setting cannot be.
    """
    text = address or environment.get(switch.ADDRESS, "")
    if not text:
        raise ConfigError(f"datapath 'switch' needs the switch's address: pass switch= or set {switch.ADDRESS}")
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        port = port.removeprefix(":")
    else:
        host, _, port = (text, "", "") if text.count(":") > 1 else text.partition(":")
    return switch.Switch(
        host,
        PORT.parse(port, "port of the switch") if port else 0,
        SWITCH_ROWS.read(environment),
        SWITCH_FORM.read(environment),
        SWITCH_CODES.read(environment),
    )
