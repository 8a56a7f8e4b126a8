"""The mistakes that ``make mutants`` makes, and how they come into a module that is loaded."""

from __future__ import annotations

import ast
from types import ModuleType

import pytest

from mutation.graft import graft
from mutation.mutants import mutants

SOURCE = '''
"""Not in docstrings: 1 < 2."""
LIMIT = 3

def near(a: int, b: int = 5) -> bool:
    """Nor here: 1 < 2."""
    if not a and b < LIMIT:
        return serial_distance(a, b) > 0
    return a + 200 == min(a, b)
'''


def test_every_mistake_is_made_once_and_alone() -> None:
    found = list(mutants(SOURCE))
    assert [mutant.name.removeprefix("near: ") for mutant in found] == [
        "not a and b < LIMIT -> b < LIMIT",
        "not a and b < LIMIT -> not a",
        "not a -> a",
        "b < LIMIT -> b <= LIMIT",
        "serial_distance(a, b) > 0 -> serial_distance(a, b) >= 0",
        "serial_distance(a, b) -> serial_distance(b, a)",
        "0 -> 1",
        "a + 200 == min(a, b) -> a + 200 != min(a, b)",
        "a + 200 -> a - 200",
        "min(a, b) -> max(a, b)",
    ]
    sources = {ast.unparse(mutant.tree) for mutant in found}
    assert len(sources) == len(found)
    assert ast.unparse(ast.parse(SOURCE)) not in sources


def test_equal_mistakes_of_a_function_are_told_apart() -> None:
    names = [mutant.name for mutant in mutants("def f(a):\n    return a + 1, a + 1\n")]
    assert names == ["f: a + 1 -> a - 1", "f: 1 -> 2", "f: a + 1 -> a - 1 #2", "f: 1 -> 2 #2"]


OLD = """
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

def near(a, by=1):
    return a + by

@cache
def kept(a):
    return a + 3

class Pair(NamedTuple):
    a: int = 0

@dataclass
class Most:
    a: int = 0
    b: list = field(default_factory=lambda: [3])

    @property
    def more(self):
        return self.a + 1

    @classmethod
    def made(cls):
        return cls(5)
"""


def load(source: str) -> ModuleType:
    module = ModuleType(__name__)  # dataclasses look it up
    exec(source, vars(module))
    return module


@pytest.mark.parametrize(
    ("right", "wrong", "seen"),
    [
        ("a + by", "a - by", "9 0 1 5 3 4"),
        ("by=1", "by=2", "12 0 1 5 3 4"),
        ("Pair(NamedTuple):\n    a: int = 0", "Pair(NamedTuple):\n    a: int = 7", "11 7 1 5 3 4"),
        ("Most:\n    a: int = 0", "Most:\n    a: int = 9", "11 0 10 5 3 4"),
        ("self.a + 1", "self.a + 2", "11 0 2 5 3 4"),
        ("cls(5)", "cls(6)", "11 0 1 6 3 4"),
        ("[3]", "[4]", "11 0 1 5 4 4"),
        ("a + 3", "a + 4", "11 0 1 5 3 5"),
    ],
)
def test_a_mistake_is_seen_by_who_has_imported_what_it_is_in(right: str, wrong: str, seen: str) -> None:
    module = load(OLD)
    near, pair, most, made = module.near, module.Pair, module.Most, module.Most.made

    def look() -> str:
        return f"{near(10)} {pair().a} {most().more} {made().a} {most().b[0]} {module.kept(1)}"

    assert not graft(module, load(OLD))
    assert look() == "11 0 1 5 3 4"
    assert graft(module, load(OLD.replace(right, wrong)))
    assert look() == seen


def test_a_statement_ends_where_those_in_it_begin() -> None:
    source = """
@dataclass(frozen=True)
class A:
    x: int = 1
    def f(self, a):
        if (
            a < 2
        ):
            return (
                a + a
            )
"""
    found = [(mutant.line, mutant.statement) for mutant in mutants(source)]
    assert found == [(4, range(0)), (7, range(6, 9)), (7, range(6, 9)), (10, range(9, 12))]
