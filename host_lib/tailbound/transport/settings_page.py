"""``docs/settings.md``, written from the table of settings: ``python -m tailbound.transport.settings_page > FILE``."""

from __future__ import annotations

from collections.abc import Iterable

from tailbound.transport.settings import OPTIONS, OTHERS, Setting

_HEAD = """\
# Settings

Generated from `host_lib/tailbound/transport/settings.py` by `make generate`.

None has to be set. An argument of `tailbound.torch.register` or `TailboundState` wins over the variable, the variable
over the default; an empty variable is none. A value that cannot be is a `ConfigError` that names variable and value and
says what to give, before any training step; a variable that looks like a setting and is none is warned of. Arguments
take the words of this table too: `hadamard="off"` is `hadamard=False`. Give all ranks the same, but for
`TAILBOUND_INTERFACE`; where a difference would let replicas diverge, the start ends with a `LayoutError` that names two
ranks, the option and both values. `process_group`, `model` and `optimizer` are objects: arguments only.
"""


def page() -> str:
    """The whole page."""
    options = _table(("variable", "argument", "default", "give", "what it is", "set by"), map(_option, OPTIONS))
    others = _table(("variable", "default", "give", "what it is", "set by"), map(_other, OTHERS))
    return f"{_HEAD}\n## Options of the hook\n\n{options}\n## Others\n\n{others}"


def _default(setting: Setting) -> str:
    return setting.otherwise or ("" if setting.default is None else f"`{setting.kind.show(setting.default)}`")


def _option(setting: Setting) -> tuple[str, ...]:
    variable, *rest = _other(setting)
    return variable, f"`{setting.option}`", *rest


def _other(setting: Setting) -> tuple[str, ...]:
    return f"`{setting.variable}`", _default(setting), setting.kind.give, setting.doc, setting.set_by


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(page(), end="")
