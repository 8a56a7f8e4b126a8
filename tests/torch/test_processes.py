"""The processes of the tests here: each is fresh, and has not to load what all of them need."""

from __future__ import annotations

import contextlib
import os
import sys
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


def test_a_rank_ends_by_itself_where_nobody_waits_for_it_any_more(tmp_path: Path) -> None:
    """The process of its test had ended in a hang, and so could not kill it."""
    from processes import Job, failing

    with Job(failing, 1, tmp_path, "waits", patience=0.5) as job:
        job.processes[0].join(60)
        assert job.processes[0].exitcode == 1


def test_commands_that_do_not_end_well_are_told_with_their_words_and_none_is_left() -> None:
    """One that ends badly, one that does not end at all, and what both have said."""
    from processes import ended

    python = [sys.executable, "-c"]
    assert ended([[*python, "print('one')"], [*python, "print('two')"]], os.environ) == [("one\n", ""), ("two\n", "")]
    with pytest.raises(AssertionError, match=r"(?s)exit codes \[0, 3\].*last words"):
        ended([[*python, ""], [*python, "import sys; print('last words'); sys.exit(3)"]], os.environ)
    stuck = ["sleep", f"86400.{os.getpid()}"]
    with pytest.raises(AssertionError, match=r"exit codes \[None\] after 0.2 s"):
        ended([stuck], os.environ, 0.2)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # others come and go
            assert stuck[1].encode() not in path.read_bytes()
