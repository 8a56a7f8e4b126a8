"""Links of the documentation lead somewhere: to a file of the repository, and to a heading in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PAGES = sorted(path for pattern in ("*.md", "docs/**/*.md", "examples/*.md") for path in _ROOT.glob(pattern))


def _anchors(page: str) -> set[str]:
    """Of all headings, as the usual renderers name them."""
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def _dead(page: Path) -> list[str]:
    """Links of ``page`` that lead nowhere; other sites are not asked."""
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        known = "://" in link or (target.exists() and (not anchor or anchor in _anchors(target.read_text())))
        dead += [] if known else [link]
    return dead


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_all_links_lead_somewhere(page: Path) -> None:
    assert not _dead(page)
