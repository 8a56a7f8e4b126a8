"""Tables of ``docs/wire.md`` and ``docs/settings.md``, from the schema and from the table of settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tailbound.settings.table import ADVANCED, OPTIONS, OTHERS, Setting
from tailbound.wire import schema
from tailbound.wire.packets import KINDS

_ROOT = Path(__file__).resolve().parents[2]
_NUMBERS = {
    "VERSION": "the header's first byte; packets of another version are dropped as BAD_VERSION",
    "DEFAULT_PORT": "UDP port of a job on an interface with an attached program",
    "EXPONENT_NONE": "`need` or `exponent` of a group in which all is zero",
    "MAX_RANKS": "ranks of a job at most",
    "OP_INDEX_BITS": "low bits of an op label that hold the index of the op within its step",
    "ROW_STEP": "a payload's length is a multiple of so many bytes",
    "KEY_WORDS": "words of a key before those of a row",
}


def _filled(page: str, tables: Mapping[str, str]) -> str:
    """The page of the repository with ``tables`` below ``<!-- generated: NAME -->``, up to an empty line."""
    text = (_ROOT / page).read_text()
    for name, table in tables.items():
        head, mark, rest = text.partition(f"<!-- generated: {name} -->\n")
        if not mark:
            raise ValueError(f"{page} has no place for the table {name}")
        text = head + mark + table + re.sub(r"\A(.+\n)*", "", rest)
    return text


def _table(head: str, rows: Iterable[Iterable[object]]) -> str:
    titles = head.split(", ")
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def wire_page() -> str:
    """Text of ``docs/wire.md``."""
    sizes = [KINDS[f.kind][0] * f.count for f in schema.HEADER.fields]
    fields = ((sum(sizes[:i]), sizes[i], f"`{f.name}`", f.kind, f.doc) for i, f in enumerate(schema.HEADER.fields))
    every = ("taken", *schema.MISSING)
    own = {v: v.advice if v.advice != v.fate.advice else "" for v in schema.Verdict}  # else as the fate's
    verdicts = ((int(v), v.name, f"`{v.fate}`", v.meaning, own[v]) for v in schema.Verdict)
    numbers = ((name, getattr(schema, name), meaning) for name, meaning in _NUMBERS.items())
    tables = {
        "header": _table("offset, bytes, field, kind, meaning", fields),
        "numbers": _table("name, value, meaning", numbers),
        "packet types": _table("number, name", ((int(kind), kind.name) for kind in schema.PacketType)),
        "flags": _table("number, name", ((int(flag), flag.name) for flag in schema.Flag)),
        "fates": _table("fate, meaning, advice", ((f"`{f}`", f.meaning, f.advice) for f in schema.Fate)),
        "missing": f"Rows that a peer should have brought = {' + '.join(f'`{fate}`' for fate in every)}.\n",
        "verdicts": _table("number, name, fate, meaning, advice", verdicts),
    }
    return _filled("docs/wire.md", tables)


def settings_page() -> str:
    """Text of ``docs/settings.md``."""

    def default(setting: Setting) -> str:
        return setting.otherwise or ("" if setting.default is None else f"`{setting.kind.show(setting.default)}`")

    def rows(settings: Iterable[Setting], *, arguments: bool = True) -> Iterable[tuple[str, ...]]:
        for each in settings:
            argument = (f"`{each.option}`",) if arguments else ()
            yield f"`{each.variable}`", *argument, default(each), each.kind.give, each.doc

    head = "variable, argument, default, give, what it is"
    tables = {
        "options": _table(head, rows(OPTIONS.values())),
        "advanced": _table(head, rows(ADVANCED.values())),
        "others": _table("variable, default, give, what it is", rows(OTHERS, arguments=False)),
    }
    return _filled("docs/settings.md", tables)
