"""Errors say what to do: every text names a remedy, or what may be given."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import tailbound.errors

NAMES = set(tailbound.errors.__all__)
#: What a reader can do, in the words that are used for it; or what there is to choose from.
REMEDY = re.compile(
    r"\b(apt-get|ask|attach|bring|build|call|check|choose|close|draw|end|enter|give|have|install|join|keep|lower|look|make"
    r"|move|name|pass|pip install|raise|register|reinstall|remove|report|restart|run|say|see|set|start|synchronise|take"
    r"|train|try|use|wait|write|did|may|are you|has it|is its?)\b"
    r"|`|\.\.|above 0|are supported|at least|at most|multiple of|one of|outside |power of two|supported are|there are:"
)
#: Values that are remedies themselves, by their names in the sources.
REMEDIES = re.compile(r"\{(example|advice|hint|why|SAME_MODEL|_FAILED|_EQUAL\['wire'\])\}")
#: Texts put together elsewhere, from a remedy that a test of their own looks at.
ELSEWHERE = {"kernel/maps.py", "kernel/linear.py", "collective/accounting.py"}


def texts(root: Path) -> list[tuple[str, str]]:
    """(file:line, text as written) of every error of the tree that is made with a text."""
    found = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        tree = ast.parse(path.read_text())
        constants = {
            target.id: ast.unparse(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            made = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMES
            if made and node.args and name not in ELSEWHERE:
                text = ast.unparse(node.args[0])
                found.append((f"{name}:{node.lineno}", constants.get(text, text)))
    return found


def spoken(text: str) -> str:
    """What of a written text is said to the reader: literals as they are, a name for every value put in."""
    return re.sub(r"\{[^{}]*\}", "X", REMEDIES.sub(" give ", text))


def test_every_error_says_what_to_do(repository: Path) -> None:
    found = texts(repository / "host_lib" / "tailbound")
    assert len(found) > 200
    silent = [f"{where}: {text}" for where, text in found if not REMEDY.search(spoken(text))]
    assert silent == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("'the transport is closed'", False),
        ("f'rank {rank} is outside 0..{ranks - 1}'", True),
        ("f'no route: {use}'", False),  # a value's name is no remedy
        ("'the package is missing: pip install it'", True),
    ],
)
def test_the_check_sees_what_it_should(text: str, said: bool) -> None:
    assert bool(REMEDY.search(spoken(text))) is said
