"""``docs/rules_index.md``: which code and which tests cite a rule of ``docs/rules.md``.

A citation is the name of a rule (part, dash, number), or two of them with "to" in between. A citation counts as a test
in a function ``test_...`` or ``check_...``, in the docstring of a file of tests, and in a table of cases.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_PARTS = "clock|codec|kernel|auth"
_RULE = re.compile(rf"^### ((?:{_PARTS})-\d+[a-z]?)\n\n\*\*(.+?)\*\*", re.MULTILINE | re.DOTALL)
_NAME = rf"\b(?P<{{0}}part>{_PARTS})-(?P<{{0}}number>\d+)(?P<{{0}}letter>[a-z]?)\b(?!\.\d)"
_CITATION = re.compile(rf"{_NAME.format('')}(?:\s+to\s+{_NAME.format('last_')})?")
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
    """A rule that is named in a file, and by which test; ``test`` is empty at the level of the file."""

    rule: str
    path: Path
    test: str
    #: whether a rule counts as tested by it
    tests: bool


def rules(root: Path) -> dict[str, str]:
    """The rules of the repository at ``root``, in order, with their titles."""
    return {name: " ".join(title.split()).rstrip(".,:") for name, title in _RULE.findall((root / _RULES).read_text())}


def cited(text: str) -> Iterator[tuple[str, int]]:
    """Rules that ``text`` names, and the offset of each citation; all that lie in a range."""
    for found in _CITATION.finditer(text):
        first = f"{found['part']}-{found['number']}{found['letter']}"
        if found["last_part"] is None:
            yield first, found.start()
            continue
        last = f"{found['last_part']}-{found['last_number']}{found['last_letter']}"
        numbers = range(int(found["number"]), int(found["last_number"]) + 1)
        whole = not found["letter"] and not found["last_letter"]
        if found["part"] != found["last_part"] or len(numbers) < 2 or not whole:
            yield f"{first} to {last}", found.start()  # the name of no rule
            continue
        for number in numbers:
            yield f"{found['part']}-{number}", found.start()


def sources(root: Path) -> list[Path]:
    """Files in which rules may be cited, below ``root``; neither the rules nor their index."""
    found = [root / name for name in _TOP if (root / name).exists()]
    for folder, ends in _SOURCES.items():
        for path in sorted((root / folder).rglob("*")):
            own = path.relative_to(root)
            if path.suffix in ends and own not in (_RULES, _INDEX) and not {"_assets", "__pycache__"} & set(own.parts):
                found.append(path)
    return found


def citations(root: Path) -> list[Citation]:
    """All citations of the repository at ``root``; those of ``rules.md`` itself included, as no test's."""
    found = [Citation(name, _RULES, "", False) for name, _ in cited((root / _RULES).read_text())]
    for path in sources(root):
        own, text = path.relative_to(root), path.read_text()
        if own.parts[0] == "tests":
            found += _of_tests(own, text)
        else:
            found += [Citation(name, own, "", False) for name, _ in cited(text)]
    return found


def old_names(root: Path) -> list[str]:
    """Citations by a name that no rule has any more, as ``path: text``."""
    return [f"{path.relative_to(root)}: {name}" for path in sources(root) for name in _OLD.findall(path.read_text())]


def page(root: Path) -> str:
    """The whole page."""
    code: dict[str, set[Path]] = {}
    tests: dict[str, set[Path]] = {}
    for one in citations(root):
        if one.path.parts[0] in _CODE:
            code.setdefault(one.rule, set()).add(one.path)
        elif one.tests:
            tests.setdefault(one.rule, set()).add(one.path)
    rows = (
        f"- [{name}](rules.md#{name}): {_files(code.get(name, ()))}; tests {_files(tests.get(name, ()))}\n"
        for name in rules(root)
    )
    return _HEAD + "".join(rows)


def _of_tests(path: Path, text: str) -> Iterator[Citation]:
    """Citations of a file of ``tests/``, by the function in which they stand."""
    table, is_tests = path.name.endswith("cases.py"), path.name.startswith("test_")
    tree = ast.parse(text)
    functions = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    lines = [offset + 1 for offset, char in enumerate(text) if char == "\n"]
    docstring = tree.body[0].end_lineno or 0 if ast.get_docstring(tree) else 0
    for name, offset in cited(text):
        line = bisect_right(lines, offset) + 1
        inside = [f.name for f in functions if _first_line(f) <= line <= (f.end_lineno or 0)]
        test = next((f for f in inside if f.startswith(("test_", "check_"))), "")
        whole = not inside and (table or (is_tests and line <= docstring))
        yield Citation(name, path, test, bool(test and (table or is_tests)) or whole)


def _first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])


def _files(paths: Iterable[Path]) -> str:
    shown = sorted(path.as_posix().removeprefix("host_lib/tailbound/").removeprefix("tests/") for path in paths)
    return ", ".join(f"`{path}`" for path in shown)
