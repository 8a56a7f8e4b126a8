"""Text for language models: Python's own standard library, character by character, cut into pieces."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np

from tailbound_lab.bench.digits import Examples

#: ASCII; other characters are left out.
CHARACTERS = 128
#: Characters of a piece.
LENGTH = 32
#: Pieces to train on, more than any benchmark has steps for; and to test on.
_TRAIN, _TEST = 16384, 64


def load(seed: int) -> Examples:
    """Pieces from places that ``seed`` draws: i64[n, LENGTH], and the characters that follow each of theirs."""
    library = Path(sysconfig.get_path("stdlib"))
    source = "".join(file.read_text("utf-8", "ignore") for file in sorted(library.glob("*.py")))
    text = np.frombuffer(source.encode("ascii", "ignore"), np.uint8).astype(np.int64)
    pieces = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    chosen = pieces[np.random.default_rng(seed).permutation(len(pieces))[: _TRAIN + _TEST]]
    inputs, labels = chosen[:, :-1].copy(), chosen[:, 1:].copy()
    return Examples(inputs[_TEST:], labels[_TEST:], inputs[:_TEST], labels[:_TEST])
