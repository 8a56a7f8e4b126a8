"""Errors say what to do: every text has an instruction, or names a command."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import tailbound.errors

NAMES = set(tailbound.errors.__all__)
#: What a reader can be told to do; a noun of the same letters is none, as it begins no clause.
VERBS = (
    "add|allow|apply|ask|attach|bring|build|call|change|check|choose|close|create|disable|drop|enable|end|exclude|fix|freeze|give|"
    "initialise|install|join|keep|leave|let|load|look|lower|make|mark|move|name|open|pass|pick|pin|put|raise|read|reduce|reinstall|"
    "remove|rename|replace|report|restart|run|say|see|send|set|shorten|split|start|stop|synchronize|take|train|try|update|"
    "use|wait|widen|write"
)
#: An instruction begins a text, a sentence or a clause, or names a command.
INSTRUCTION = re.compile(
    rf"(^|[:;.,—] +|\(|\bor )((and|or|then|either|please) )?(do not )?({VERBS})\b"
    r"|\bpip install\b|\bapt-get install\b|\btailbound [a-z]+\b",
    re.IGNORECASE,
)
#: Values that are remedies themselves, by their names in the sources.
REMEDIES = re.compile(r"\{(example|advice|hint|why|SAME_MODEL|refusal|_CUT|_FAILED|_EQUAL\['wire'\])\}")
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
                known = constants.get(text, f"{{{text}}}" if text.isidentifier() else text)
                found.append((f"{name}:{node.lineno}", known))
    return found


def instructs(text: str) -> bool:
    """Whether a written text says what to do: literals as they are, a letter for every value put in."""
    said = re.sub(r"\{[^{}]*\}", "X", REMEDIES.sub(": give ", text))
    return INSTRUCTION.search(re.sub(r"^f?['\"]|['\"]$", "", said)) is not None


def test_every_error_says_what_to_do(repository: Path) -> None:
    found = texts(repository / "host_lib" / "tailbound")
    assert len(found) > 200
    assert [f"{where}: {text}" for where, text in found if not instructs(text)] == []
