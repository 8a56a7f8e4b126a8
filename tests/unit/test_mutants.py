"""The mistakes that ``make mutants`` makes."""

from __future__ import annotations

import ast

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
