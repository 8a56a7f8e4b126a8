"""``bench tensors``: the real engine with a small model in place of the example's."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tailbound_lab.simulate import tensors


class _Model(nn.Module):
    """Predicts the next word from one; tensors of very different sizes of gradients."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.words, self.small = nn.Embedding(tokens, 16), nn.Parameter(torch.ones(16))

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) * (1 + 1e-2 * self.small)
        return nn.functional.cross_entropy((x @ self.words.weight.T).flatten(0, 1), following.flatten())


def test_rows_tell_the_error_of_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = SimpleNamespace(SMALL=SimpleNamespace(tokens=50), GPT=lambda shape: _Model(shape.tokens))
    example.text = lambda most: torch.randint(most, (500,), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(tensors, "_example", lambda: example)
    rows = tensors.run(tmp_path / "rows.json", tensors.ways(3), ranks=2, steps=10, seeds=(3,))
    assert [row["name"] for row in rows] == ["plain", "balance", "balance, 3 fine steps"]
    assert json.loads((tmp_path / "rows.json").read_text())[0]["above"] == rows[0]["above"]
    plain, balanced, fine = rows
    assert plain["errors"][:3] == balanced["errors"][:3]  # the same gradients, and no exponents yet
    assert all(error[1] < 1e-4 for error in fine["errors"][:3])
    assert plain["worst_tensor"] == "small"
    assert plain["changes"] == 0 < balanced["changes"]
    assert balanced["errors"][-1][1] < 0.2 * plain["errors"][-1][1]
    assert [line["way"] for line in tensors.table(rows)] == [row["name"] for row in rows]


def test_without_the_example_it_says_where_it_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tensors, "_EXAMPLE", tmp_path / "none.py")
    with pytest.raises(tensors.ConfigError, match="from a checkout"):
        tensors.Gradients(2, 0)
