"""Rules of the sources: imports go one way, and every error says what to do.

wire <- codec, kernel, transport, datapath <- collective <- torch <- verbs <- the laboratory (``tailbound_lab``), a
package of its own that uses public names of the product only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import tailbound.errors

#: Lowest first; a package imports only from lower rows, and from its own row where that makes no circle.
LAYERS = (
    {"__init__", "autoload", "errors", "forks"},
    {"wire"},
    {"codec", "kernel", "transport", "observe", "settings", "datapath"},
    {"collective"},
    {"torch"},
    {"integrations"},
    {"doctor", "switch", "top", "metrics", "prepare", "cli"},
    {"__main__"},
    {"lab"},
    {"bench", "simulate", "demo", "tailbound_lab"},
)
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}


def imports_of(source: str, module: str, *, is_package: bool = False) -> Iterator[str]:
    """Dotted names that ``source`` imports anywhere, those under ``if TYPE_CHECKING`` and in functions included."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{stem}.{alias.name}" for alias in node.names)


@pytest.fixture(scope="module")
def graph(repository: Path) -> dict[str, set[str]]:
    """Modules of the packages and the modules of them that each imports."""
    root = repository / "host_lib"
    files = {}
    for path in sorted(p for name in ("tailbound", "tailbound_lab") for p in (root / name).rglob("*.py")):
        if "_assets" in path.parts:
            continue
        parts = path.relative_to(root).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        named = imports_of(path.read_text(), module, is_package=path.name == "__init__.py")
        # `from tailbound.wire import schema` names a module, `from tailbound.wire.schema import VERSION` a part of one
        found = {name if name in files else name.rpartition(".")[0] for name in named}
        graph[module] = {name for name in found if name in files} - {module}
    return graph


def package_of(module: str) -> str:
    top, _, rest = module.partition(".")
    first = rest.partition(".")[0]
    if top == "tailbound":
        return first or "__init__"
    return first if first in LEVEL and first not in {"cli", "__init__"} else top


def test_imports_go_one_way(graph: dict[str, set[str]]) -> None:
    assert {package_of(m) for m in graph} <= set(LEVEL)
    assert len(graph) > 20
    imports = [(module, other) for module, others in graph.items() for other in others]
    assert [(a, b) for a, b in imports if LEVEL[package_of(b)] > LEVEL[package_of(a)]] == []


def test_neither_packages_nor_modules_import_in_a_circle(graph: dict[str, set[str]]) -> None:
    packages: dict[str, set[str]] = {}
    for module, others in graph.items():
        here = package_of(module)
        packages.setdefault(here, set()).update({package_of(other) for other in others} - {here})
    for each in (packages, graph):
        tuple(TopologicalSorter(each).static_order())  # or an error with the circle


def test_the_laboratory_uses_public_names(repository: Path) -> None:
    """It takes no private name of the product, and none that its module does not export."""
    root = repository / "host_lib"
    found = []
    for path in sorted((root / "tailbound_lab").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("tailbound."):
                continue
            source = root.joinpath(*node.module.split(".")).with_suffix(".py")
            exported = re.search(r"^__all__ = \[(.*?)\]", source.read_text(), re.M | re.S) if source.exists() else None
            for alias in node.names:
                hidden = exported is not None and f'"{alias.name}"' not in exported[1]
                if alias.name.startswith("_") or hidden:
                    found.append(f"{path.relative_to(root)}: {node.module}.{alias.name}")
    assert found == []


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
ELSEWHERE = {"kernel/maps.py", "kernel/linear.py"}


def test_every_error_says_what_to_do(repository: Path) -> None:
    """Of every error that is made with a text: literals as they are, a letter for every value put in."""
    found, silent, root = 0, [], repository / "host_lib" / "tailbound"
    for path in sorted(root.rglob("*.py")):
        name, tree = path.relative_to(root).as_posix(), ast.parse(path.read_text())
        constants = {
            ast.unparse(target): ast.unparse(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
        }
        for node in ast.walk(tree) if name not in ELSEWHERE else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) in NAMES and node.args:
                text = ast.unparse(node.args[0])
                known = constants.get(text, f"{{{text}}}" if text.isidentifier() else text)
                said = re.sub(r"\{[^{}]*\}", "X", REMEDIES.sub(": give ", known))
                found += 1
                if not INSTRUCTION.search(re.sub(r"^f?['\"]|['\"]$", "", said)):
                    silent.append(f"{name}:{node.lineno}: {known}")
    assert found > 200
    assert silent == []
