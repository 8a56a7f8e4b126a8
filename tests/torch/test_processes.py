"""The processes of the tests here: each is fresh, and has not to load what all of them need."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("torch")


@pytest.mark.parametrize(
    ("how", "words"), [("raises", r"(?s)rank 1:\n.*KeyError: 'raises'"), ("dies", "rank 1 ended with -9")]
)
def test_a_rank_that_fails_or_dies_is_named_at_once_and_none_is_left(tmp_path: Path, how: str, words: str) -> None:
    """Rank 0 would wait for rank 1 for ever."""
    from processes import Job, failing

    with Job(failing, 2, tmp_path, how) as job, pytest.raises(AssertionError, match=words):
        job.results()
    assert not any(process.is_alive() for process in job.processes)
