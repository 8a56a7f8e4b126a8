"""``docs/rules_index.md``: which code and which tests cite a rule of ``docs/rules.md``.

A citation is the name of a rule (part, dash, number), or two of them with "to" in between. A citation counts as a test
in a file of tests and in a table of cases.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_PARTS = "clock|codec|kernel|auth"
_RULE = re.compile(rf"^### ((?:{_PARTS})-\d+[a-z]?)\n\n\*\*(.+?)\*\*", re.MULTILINE | re.DOTALL)
_NAME = rf"\b({_PARTS})-(\d+)([a-z]?)\b(?!\.\d)"
_CITATION = re.compile(rf"{_NAME}(?:\s+to\s+{_NAME})?")
#: Names that rules had in documents that are no part of the project.
_OLD = re.compile(r"\b(?:CLOCK[S]|CODE[C]|DESIG[N])(?:\.md)?\b(?!_)|\b[Rr]ules? \d+[a-c]?\b")
#: Where citations are looked for, by the ends of files' names.
_SOURCES = {
    "host_lib/tailbound": (".py",),
    "host_lib/tailbound_lab": (".py",),
    "host_lib/core": (".c", ".h"),
    "ebpf": (".h",),
    "xdp_programs": (".h", ".c"),
    "p4": (".p4", ".md"),
    "tests": (".py",),
    "examples": (".py", ".md"),
    "docs": (".md",),
}
_TOP = ("README.md", "CHANGELOG.md")
_RULES, _INDEX = Path("docs", "rules.md"), Path("docs", "rules_index.md")
_CODE = ("host_lib", "ebpf", "xdp_programs", "p4")

_HEAD = """\
# Rules: where they are, and what tests them

Generated from citations by `make generate`. Code is below `host_lib/tailbound/` where no other folder is named, tests
are below `tests/`.

"""


class Citation(NamedTuple):
    """A rule that is named in a file."""

    rule: str
    path: Path
    #: whether the rule counts as tested there
    tests: bool


def rules(root: Path) -> dict[str, str]:
    """The rules of the repository at ``root``, in order, with their titles."""
    return {name: " ".join(title.split()).rstrip(".,:") for name, title in _RULE.findall((root / _RULES).read_text())}


def cited(text: str) -> Iterator[str]:
    """Rules that ``text`` names, all that lie in a range."""
    for part, number, letter, last_part, last, last_letter in _CITATION.findall(text):
        if not last:
            yield f"{part}-{number}{letter}"
        elif part != last_part or int(number) >= int(last) or letter or last_letter:
            yield f"{part}-{number}{letter} to {last_part}-{last}{last_letter}"  # the name of no rule
        else:
            yield from (f"{part}-{each}" for each in range(int(number), int(last) + 1))


def sources(root: Path) -> Iterator[Path]:
    """Files in which rules may be cited, below ``root``; neither the rules nor their index."""
    yield from (root / name for name in _TOP if (root / name).exists())
    for folder, ends in _SOURCES.items():
        for path in sorted((root / folder).rglob("*")):
            own = path.relative_to(root)
            if path.suffix in ends and own not in (_RULES, _INDEX) and not {"_assets", "__pycache__"} & set(own.parts):
                yield path


def citations(root: Path) -> list[Citation]:
    """All citations of the repository at ``root``; those of ``rules.md`` itself included, as no test's."""
    found = []
    for path in (root / _RULES, *sources(root)):
        own = path.relative_to(root)
        tests = own.parts[0] == "tests" and (own.name.startswith("test_") or own.name.endswith("cases.py"))
        found += [Citation(name, own, tests) for name in cited(path.read_text())]
    return found


def old_names(root: Path) -> list[str]:
    """Citations by a name that no rule has any more, as ``path: text``."""
    return [f"{path.relative_to(root)}: {name}" for path in sources(root) for name in _OLD.findall(path.read_text())]


def page(root: Path) -> str:
    """The whole page."""
    every = citations(root)
    rows = []
    for name in rules(root):
        paths = {one.path: one.tests for one in every if one.rule == name}
        code = _files(path for path in paths if path.parts[0] in _CODE)
        rows.append(f"- [{name}](rules.md#{name}): {code}; tests {_files(p for p, tests in paths.items() if tests)}\n")
    return _HEAD + "".join(rows)


def _files(paths: Iterable[Path]) -> str:
    shown = sorted(path.as_posix().removeprefix("host_lib/tailbound/").removeprefix("tests/") for path in paths)
    return ", ".join(f"`{path}`" for path in shown)
