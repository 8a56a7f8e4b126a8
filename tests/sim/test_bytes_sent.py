"""``bench bytes``: what a run counts is what packets of that length come to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tailbound_lab.simulate import bytes_sent


def test_four_bits_up_and_eight_down_against_eight(tmp_path: Path) -> None:
    rows = bytes_sent.run(tmp_path / "bytes.json", ranks=4, bits=((4, 8), 4))
    assert json.loads((tmp_path / "bytes.json").read_text()) == rows
    up, down = 704 + 64, 1408 + 64  # packets of as many entries, headers included
    shares = {row["bits"]: (row["share"], row["cloned_share"]) for row in rows}
    assert shares["4,8"] == pytest.approx(((up + down) / (2 * down), (3 * up + down) / (4 * down)))
    assert shares[8] == (1, 1)
    assert shares[4] == (0.5, 0.5)
    assert [line["bits"] for line in bytes_sent.table(rows)] == [8, "4,8", 4]
