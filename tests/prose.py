"""Counts patterns that make prose hard to read, by folder; a count may only fall (``make lint``).

    python tests/prose.py            fails if a count is above the one in tests/prose.json
    python tests/prose.py --write    lowers that table to the present counts, or makes it if it is missing

It reads pages, docstrings, comments, texts of errors and of command-line help. A new folder starts at zero.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCES = ("docs", "examples", "host_lib", "p4", "ebpf", "xdp_programs", "tests")
ENDS = {".md", ".py", ".c", ".h", ".p4"}
WORDS = 30
LONG = f"a sentence of more than {WORDS} words"
PATTERNS = {
    "who is, has, comes, owns": r"\b[Ww]ho (is|has|comes|owns)\b",
    "What is, was, has": r"^What (is|was|has)\b",
    "is no ...": r"(?<!there )\bis no (?!longer\b|more\b|better\b)\w+",
    "of late, as ever, for good": r"\b(of late|as ever|for good)\b",
    "heeds, is through": r"\b(heeds?|is through)\b",
    "nobody, somebody, whoever": r"\b([Nn]obody|[Ss]omebody|[Ww]hoever)\b",
}


def findings(root: Path) -> Iterator[tuple[tuple[str, str], str]]:
    """Folder and pattern of each finding below ``root``, with its file, line and words."""
    below = sorted(path for name in SOURCES for path in (root / name).rglob("*") if path.suffix in ENDS)
    for path in [root / "README.md", root / "CONTRIBUTING.md", *below]:
        own = path.relative_to(root)
        if not path.exists() or {"_assets", "build"} & set(own.parts):
            continue
        for line, block in blocks(path):
            prose = " ".join(re.sub(r"`+[^`]*`+", "it", block).split())
            for sentence in re.split(r"(?<=[.!?:;])\W*\s+", prose):
                found = [name for name, pattern in PATTERNS.items() for _ in re.finditer(pattern, sentence)]
                found += [LONG] if len(re.findall(r"[A-Za-z][\w'-]*", sentence)) > WORDS else []
                folder = "/".join(own.parent.parts[:3]) or "."
                yield from (((folder, name), f"{own}:{line}: {sentence[:100]}") for name in found)


def blocks(path: Path) -> Iterator[tuple[int, str]]:
    """Pieces of prose in ``path``, each with its line."""
    text = path.read_text()
    if path.suffix == ".md":
        yield from _split(1, re.sub(r"(?m)^(?: {4}|\t).*$", "", text))
    elif path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from _split(getattr(node, "lineno", 1), ast.get_docstring(node) or "")
            elif isinstance(node, ast.Raise) or (isinstance(node, ast.keyword) and node.arg == "help"):
                parts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                yield node.lineno, " ".join(part for part in parts if isinstance(part, str))
        yield from _comments(text)
    else:
        for comment in re.finditer(r"/\*(.*?)\*/", text, re.DOTALL):
            yield text.count("\n", 0, comment.start()) + 1, re.sub(r"\n\s*\*", " ", comment[1])


def _split(first: int, text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, items of lists, arguments, cells of tables."""
    start, words = first, ""
    for number, line in enumerate(text.split("\n"), first):
        if not line.strip() or re.match(r"\s*([-*|#>]|\d+\.|\w+:)\s", line):
            yield start, words
            start, words = number, ""
        if line.startswith("|"):
            yield from ((number, cell.strip(" *")) for cell in line.split("|"))
        else:
            words = f"{words} {line.strip(' *#->')}"
    yield start, words


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """Comments; those of lines that follow each other are one."""
    first, last, words = 0, 0, ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] > last + 1:
                yield first, words
                first, words = token.start[0], ""
            last, words = token.start[0], f"{words} {token.string.lstrip('#: ')}"
    yield first, words


def main(root: Path, *, write: bool = False) -> int:
    """Compares the counts with the table; returns 1 if one has risen."""
    table = root / "tests" / "prose.json"
    allowed = json.loads(table.read_text()) if table.exists() else None
    found = list(findings(root))
    counts = Counter(place for place, _ in found)
    if write:
        rows: dict[str, dict[str, int]] = {}
        for (folder, name), count in sorted(counts.items()):
            most = count if allowed is None else min(count, allowed.get(folder, {}).get(name, 0))
            rows.setdefault(folder, {}).update({name: most} if most else {})
        table.write_text(json.dumps(rows, indent=1) + "\n")
        return 0
    before = {place: (allowed or {}).get(place[0], {}).get(place[1], 0) for place in counts}
    risen = sorted(place for place, count in counts.items() if count > before[place])
    changed = subprocess.run(["git", "diff", "--name-only", "HEAD~1"], cwd=root, capture_output=True, text=True)
    for place in risen:
        print(f"{place[0]}: {counts[place]} times '{place[1]}', at most {before[place]} allowed. In changed files:")
        print(*(f"    {where}" for p, where in found if p == place and where.split(":")[0] in changed.stdout), sep="\n")
    return 1 if risen else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1], write="--write" in sys.argv))
