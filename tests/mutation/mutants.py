"""Small mistakes in Python source: each a function of the syntax tree and of a place in it."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

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
        line: in the source.
        statement: the lines of its statement, of a compound one its head; empty outside of functions, where what is
            wrong stands when the module is loaded.
        tree: the whole module with the mistake in it.
    """

    name: str
    line: int
    statement: range
    tree: ast.Module


def mutants(source: str) -> Iterator[Mutant]:
    """All mistakes that can be made in ``source``, one at a time."""
    seen: Counter[str] = Counter()
    for number, (where, statement, node) in enumerate(_places(ast.parse(source))):
        for kind in range(_kinds(node)):
            tree = ast.parse(source)
            target = next(found for n, (_, _, found) in enumerate(_places(tree)) if n == number)
            before = ast.unparse(node)
            after = _change(tree, target, kind)
            name = f"{where}: {before} -> {after}"
            seen[name] += 1
            name = name if seen[name] == 1 else f"{name} #{seen[name]}"
            yield Mutant(name, node.lineno, statement, ast.fix_missing_locations(tree))


def _places(tree: ast.Module) -> Iterator[tuple[str, range, ast.expr]]:
    """Expressions in functions and classes that can be changed: the name of where they are, their statement's lines."""

    def walk(node: ast.AST, where: str, lines: range) -> Iterator[tuple[str, range, ast.expr]]:
        for child in ast.iter_child_nodes(node):
            inside, at = where, lines
            if isinstance(child, ast.stmt):
                at = range(0) if isinstance(node, ast.ClassDef | ast.Module) else _head(child)
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                inside = f"{where}.{child.name}" if where else child.name
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and child in node.decorator_list:
                continue
            if isinstance(node, ast.FunctionDef) and child in (node.args, node.returns):
                continue
            if isinstance(child, ast.AnnAssign) and child.value is None:
                continue
            if where and isinstance(child, ast.expr) and _kinds(child):
                yield where, at, child
            yield from walk(child, inside, at)

    yield from walk(tree, "", range(0))


def _head(statement: ast.stmt) -> range:
    """The lines of ``statement`` up to the statements in it."""
    first, last = statement.lineno, statement.end_lineno or statement.lineno
    inner = [node.lineno for node in ast.iter_child_nodes(statement) if isinstance(node, ast.stmt)]
    return range(first, max(first + 1, min(inner, default=last + 1)))


def _kinds(node: ast.AST) -> int:
    """In how many ways ``node`` can be changed."""
    match node:
        case ast.Compare(ops=[op]):
            return int(type(op) in _COMPARE)
        case ast.BinOp(op=op):
            return int(type(op) in _ARITHMETIC)
        case ast.UnaryOp(op=ast.Not()) | ast.IfExp():
            return 1
        case ast.BoolOp(values=values):
            return len(values)  # each of them left out
        case ast.Constant(value=bool()):
            return 1
        case ast.Constant(value=int() as value):
            return int(abs(value) < 100)
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return int(name in _NAMES or (name in _ORDERED and len(arguments) == 2))
    return 0


def _change(tree: ast.Module, node: ast.expr, kind: int) -> str:
    """Changes ``node`` within ``tree``; returns its new source."""
    new: ast.expr = node
    match node:
        case ast.Compare(ops=[op]):
            node.ops = [_COMPARE[type(op)]()]
        case ast.BinOp(op=op):
            node.op = _ARITHMETIC[type(op)]()
        case ast.UnaryOp(operand=operand):
            new = operand
        case ast.IfExp():
            node.body, node.orelse = node.orelse, node.body
        case ast.BoolOp(values=values):
            new = values[1 - kind] if len(values) == 2 else ast.BoolOp(node.op, values[:kind] + values[kind + 1 :])
        case ast.Constant(value=bool() as value):
            node.value = not value
        case ast.Constant(value=int() as number):
            node.value = number + 1
        case ast.Call(func=ast.Name(id=name) as function):
            if name in _NAMES:
                function.id = _NAMES[name]
            else:
                node.args.reverse()
    if new is not node:
        _Replace(node, new).visit(tree)
    return ast.unparse(new)


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else super().visit(node)
