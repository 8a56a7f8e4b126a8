"""Rules and citations belong together: every rule has a test, every citation a rule, and the index is up to date."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from generate import rules_index

# Names of rules here are put together, so that they are no citations of this file.
_CLOCK, _CODEC = "clock", "codec"


def test_every_rule_has_a_test(repository: Path) -> None:
    rules = rules_index.rules(repository)
    assert len(rules) > 70
    tested = {one.rule for one in rules_index.citations(repository) if one.tests}
    assert [name for name in rules if name not in tested] == [], "cite the rule in a test that checks it"


def test_every_citation_has_a_rule(repository: Path) -> None:
    rules = rules_index.rules(repository)
    unknown = {f"{one.path}: {one.rule}" for one in rules_index.citations(repository) if one.rule not in rules}
    assert sorted(unknown) == [], "no such rule in docs/rules.md"
    assert rules_index.old_names(repository) == [], "cite rules by their names in docs/rules.md"


def test_every_rule_is_read(repository: Path) -> None:
    """A heading that is no rule, or a rule named twice, would be left out without a word. Each has its reason."""
    text = (repository / "docs" / "rules.md").read_text()
    headings = [line.removeprefix("### ") for line in text.splitlines() if line.startswith("### ")]
    assert headings == list(rules_index.rules(repository))
    assert all(part.count("*Why: ") == 1 for part in text.split("\n### ")[1:])


@pytest.mark.needs("torch")
def test_docstrings_of_public_names_cite_no_rule() -> None:
    """They are for users, who have no use for numbers."""
    import tailbound.torch

    public = [vars(tailbound.torch)[name] for name in tailbound.torch.__all__]
    parts = [(name, part) for one in public for name, part in vars(one).items() if not name.startswith("_")]
    texts = {
        name: inspect.getdoc(one) or "" for name, one in [*zip(tailbound.torch.__all__, public, strict=True), *parts]
    }
    assert [name for name, text in texts.items() if [*rules_index.cited(text)]] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"({_CLOCK}-7c, {_CODEC}-5).", [f"{_CLOCK}-7c", f"{_CODEC}-5"]),
        (f"{_CLOCK}-3 to\n    {_CLOCK}-5", [f"{_CLOCK}-3", f"{_CLOCK}-4", f"{_CLOCK}-5"]),
        (f"{_CLOCK}-5 to {_CLOCK}-3", [f"{_CLOCK}-5 to {_CLOCK}-3"]),
        (f"{_CLOCK}-5 to {_CODEC}-6", [f"{_CLOCK}-5 to {_CODEC}-6"]),
        (f"{_CLOCK}-7a to {_CLOCK}-7c", [f"{_CLOCK}-7a to {_CLOCK}-7c"]),
        ("kernel" + "-6.18 and stage-3 and a kernel" + "-side loop", []),
    ],
)
def test_citations_are_read(text: str, found: list[str]) -> None:
    assert [name for name, _ in rules_index.cited(text)] == found
