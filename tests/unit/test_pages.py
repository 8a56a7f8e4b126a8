"""Links and citations lead somewhere: every link, every rule has a test, and every citation a rule."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from generate import rules_index

_ROOT = Path(__file__).parents[2]
_PAGES = sorted(path for pattern in ("*.md", "docs/**/*.md", "examples/*.md") for path in _ROOT.glob(pattern))


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_all_links_lead_somewhere(page: Path) -> None:
    """Anchors are headings as the usual renderers name them. Other sites are not asked."""
    for link in re.findall(r"\]\(((?!\w+://)[^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
        anchors = [re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in anchors, link


def test_every_rule_has_a_test_and_every_citation_a_rule(repository: Path) -> None:
    rules, citations = rules_index.rules(repository), rules_index.citations(repository)
    assert len(rules) > 70
    tested = {one.rule for one in citations if one.tests}
    assert [name for name in rules if name not in tested] == [], "cite the rule in a test that checks it"
    unknown = {f"{one.path}: {one.rule}" for one in citations if one.rule not in rules}
    assert sorted(unknown) == [], "no such rule in docs/rules.md"
    assert rules_index.old_names(repository) == [], "cite rules by their names in docs/rules.md"


def test_every_rule_is_read(repository: Path) -> None:
    """A heading that is no rule, or a rule named twice, would be left out without a word. Each has its reason."""
    text = (repository / "docs" / "rules.md").read_text()
    headings = [line.removeprefix("### ") for line in text.splitlines() if line.startswith("### ")]
    assert headings == list(rules_index.rules(repository))
    assert all(part.count("*Why: ") == 1 for part in text.split("\n### ")[1:])
