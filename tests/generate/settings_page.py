"""``docs/settings.md``, written from the table of settings."""

from __future__ import annotations

from collections.abc import Iterable

from tailbound.settings.table import ADVANCED, OPTIONS, OTHERS, Setting
from tailbound.transport.config import DEFAULT_PORT, PORTS

_HEAD = """\
# Settings

Generated from `host_lib/tailbound/settings/table.py` by `make generate`.

None has to be set. An argument of `tailbound.torch.register` wins over the variable, the variable over the default; an
empty variable is none. An invalid value is a `ConfigError` with the accepted values, before any training step. Unknown
`TAILBOUND_` variables cause a warning. Arguments take the table's words: `bits="4,8"` is `bits=(4, 8)`. Give all ranks
the same, but for `TAILBOUND_INTERFACE`; a difference that would let replicas diverge is a `LayoutError` with both ranks
and values. `tailbound switch job add` prints those of a switch.
"""

#: Heading, rows and what is below of the section on ports.
_PORTS_HEAD = "## Ports and firewalls\n\nAll ranks talk to all others, both ways, over IPv4 or over IPv6.\n"
_PORTS = (
    (
        "rows, `udp`",
        "UDP",
        (f"a free one; with `TAILBOUND_PORT=N` the first free one of N to N + {PORTS - 1}, one for each rank and job"),
        "the sender's own one of these",
    ),
    (
        "rows, `xdp`",
        "UDP",
        (
            f"the receiver's program's: {DEFAULT_PORT}, `tailbound attach --port`, or `TAILBOUND_PORT` where the "
            "trainer attaches it"
        ),
        "several free ones; of single packets the program's",
    ),
    (
        "rows through a switch",
        "UDP",
        f"the job's entry: {DEFAULT_PORT}, `TAILBOUND_SWITCH=ADDRESS:PORT`, or `TAILBOUND_PORT`",
        "as above",
    ),
    (
        "results by multicast, `xdp`",
        "IGMP; UDP to a group of 239.192.0.0/14, or to `TAILBOUND_MULTICAST_GROUP`",
        "as above",
        "as above",
    ),
    (
        "resynchronization, catching up",
        "TCP between all ranks",
        "any",
        "any",
    ),
    (
        "the store of torch.distributed",
        "TCP to rank 0's host",
        "`MASTER_PORT`, and torchrun's `--rdzv-endpoint`",
        "any",
    ),
    ("Gloo", "TCP between all ranks", "any", "any"),
)
_PORTS_TAIL = """\
Where UDP does not pass, the start ends after ten seconds and names the ranks that do not hear each other. TCP is not
tried ahead. Multicast that does not arrive is given up after two ops.
"""


def page() -> str:
    """The whole page."""
    head = ("variable", "argument", "default", "give", "what it is")
    options, advanced = (_table(head, map(_option, table.values())) for table in (OPTIONS, ADVANCED))
    others = _table(("variable", "default", "give", "what it is"), map(_other, OTHERS))
    ports = _table(("what", "protocol", "destination port", "source port"), _PORTS)
    parts = (
        _HEAD, f"## Options of the hook\n\n{options}", f"## Advanced\n\nEntries of `advanced={{...}}`.\n\n{advanced}",
        f"## Others\n\n{others}", _PORTS_HEAD, ports, _PORTS_TAIL,
    )  # fmt: skip
    return "\n".join(parts)


def _default(setting: Setting) -> str:
    return setting.otherwise or ("" if setting.default is None else f"`{setting.kind.show(setting.default)}`")


def _option(setting: Setting) -> tuple[str, ...]:
    variable, *rest = _other(setting)
    return variable, f"`{setting.option}`", *rest


def _other(setting: Setting) -> tuple[str, ...]:
    return f"`{setting.variable}`", _default(setting), setting.kind.give, setting.doc


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
