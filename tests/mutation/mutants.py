"""Small mistakes in Python source: each an expression of the syntax tree, and another one in its place."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
#: Functions of two arguments whose order says which of two comes first.
_ORDERED = {"serial_distance", "step_distance"}


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        name: where and what, without line numbers: it stays the same while other code changes.
        tree: the whole module.
        old, new: what is right, and what is wrong, in it.
    """

    name: str
    tree: ast.Module
    old: ast.expr
    new: ast.expr

    def make(self, file: str) -> CodeType:
        """The module with the mistake in it; its tree has it from then on."""
        tree = _Replace(self.old, self.new).visit(self.tree)
        return compile(ast.fix_missing_locations(tree), file, "exec")


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else super().visit(node)


def mutants(source: str) -> Iterator[Mutant]:
    """All mistakes that can be made in ``source``, one at a time."""
    seen, tree = Counter[str](), ast.parse(source)
    for where, node in _places(tree):
        for new in _mistakes(node):
            name = f"{where}: {ast.unparse(node)} -> {ast.unparse(new)}"
            seen[name] += 1
            yield Mutant(name if seen[name] == 1 else f"{name} #{seen[name]}", tree, node, new)


def _places(tree: ast.AST, where: str = "") -> Iterator[tuple[str, ast.expr]]:
    """Expressions in functions and classes, and the name of where they are."""
    for child in ast.iter_child_nodes(tree):
        inside = where
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            inside = f"{where}.{child.name}" if where else child.name
        if isinstance(tree, ast.ClassDef | ast.FunctionDef) and child in tree.decorator_list:
            continue
        if isinstance(tree, ast.FunctionDef) and child in (tree.args, tree.returns):
            continue
        if isinstance(child, ast.AnnAssign) and child.value is None:
            continue
        if where and isinstance(child, ast.expr):
            yield where, child
        yield from _places(child, inside)


def _mistakes(node: ast.expr) -> Iterator[ast.expr]:
    """What ``node`` could be by mistake."""
    match node:
        case ast.Compare(left, [op], right) if type(op) in _COMPARE:
            yield ast.Compare(left, [_COMPARE[type(op)]()], right)
        case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
            yield ast.BinOp(left, _ARITHMETIC[type(op)](), right)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.BoolOp(op, values):  # each of them left out
            for i in range(len(values)):
                rest = values[:i] + values[i + 1 :]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() as number) if abs(number) < 100:
            yield ast.Constant(number + 1)
        case ast.Call(ast.Name(name), arguments, keywords) if name in _NAMES:
            yield ast.Call(ast.Name(_NAMES[name], ast.Load()), arguments, keywords)
        case ast.Call(ast.Name(name) as function, [first, second], keywords) if name in _ORDERED:
            yield ast.Call(function, [second, first], keywords)
