"""The real trainers: a rank stops, all meet in a collective of the trainer, and replicas end equal.

In two of them gradients overflow, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from processes import Run
from tailbound.errors import TransportError

pytestmark = pytest.mark.needs("torch")

#: What each says of a job in which the loss is gathered 1 time in 16 steps.
TRAINERS = {
    "transformers": ["the loss is gathered every 16 steps: raise logging_steps"],
    "lightning": [],
    "accelerate": [],
}


@pytest.mark.parametrize("trainer", [pytest.param(name, marks=pytest.mark.needs(name)) for name in TRAINERS])
@pytest.mark.parametrize("away", ["behind", pytest.param("lost", marks=pytest.mark.thorough)])
def test_a_rank_stops(run: Run, tmp_path: Path, trainer: str, away: str) -> None:
    """All hold while they log, evaluate and save; what is saved is what all ranks have, also who was away.

    A rank whose ring held what it missed ended with an error, and one whose ring did not saved what it had.
    """
    found = run(f"trainer_jobs.{trainer}", 3, tmp_path / "out", away)
    for one in found:
        assert one["held"] == {"log": True, "evaluation": True, "save": True}
        assert [text.partition(": ")[2] for text in one["said"]] == TRAINERS[trainer]
        assert one["saved"] == one["file"] == found[0]["saved"]
        assert one["rate"] == found[0]["rate"]
    assert len({one["end"] for one in found}) == 1
    assert [one["whole"] for one in found] == [0, 0, away == "lost"]


def test_replicas_that_differ_are_not_saved_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    """A rank stayed away for longer than it is waited for; before the checkpoint it is waited for once more."""
    from tailbound.integrations.training import EQUAL_WITHIN, Training

    training, answers, asked = Training("Some trainer", {}), [False, True], list[float]()
    training.state = SimpleNamespace(  # type: ignore[assignment]
        detached=False, rank=1, hold=nullcontext, synchronize=lambda seconds: (asked.append(seconds), answers.pop(0))[1]
    )
    for said in (1, 1, 1):
        training.pause(equal=True)
        assert caplog.text.count("what Some trainer evaluates or saves now may differ between ranks") == said
    assert asked == [EQUAL_WITHIN] * 2


class Ended:
    """A state that has been closed holds no more, and says so."""

    rank, detached = 0, False

    def __init__(self) -> None:
        self.calls = list[str]()

    @contextmanager
    def hold(self) -> Iterator[None]:
        if "close" in self.calls:
            raise TransportError("the transport is closed")
        yield

    def synchronize(self, seconds: float) -> bool:
        self.calls.append("synchronize")
        return True

    def close(self) -> None:
        self.calls.append("close")


def test_what_a_trainer_does_after_training_pauses_nothing() -> None:
    """Lightning validated, and Accelerate's programs wait for everyone before they save: over a closed transport.

    A pause that does not begin is none, where only the transport has ended.
    """
    from tailbound.integrations.training import Training

    training, state = Training("Some trainer", {}), Ended()
    training.state = state  # type: ignore[assignment]
    training.end()
    training.end()
    assert training.held(lambda: len(state.calls), equal=True)() == 2
    assert state.calls == ["synchronize", "close"]
    training = Training("Some trainer", {})
    training.state = state  # type: ignore[assignment]
    with pytest.raises(TransportError):
        training.pause()
    training.resume()


@pytest.mark.needs("accelerate")
def test_accelerate_ends_the_training_of_all_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    from tailbound.integrations import accelerate

    calls = list[str]()

    def begin(training: Any, model: str, *_: Any, **__: Any) -> None:
        training.end = lambda: calls.append(model)

    monkeypatch.setattr(accelerate.Training, "begin", begin)
    methods = dict.fromkeys(accelerate._COLLECTIVES, list)
    accelerator: Any = SimpleNamespace(
        _dataloaders=[], _schedulers=[], scaler=None, end_training=lambda: calls.append("trackers"), **methods
    )
    for model in ("first", "second"):
        accelerate.register(accelerator, model, None)
    accelerator.end_training()
    assert (sorted(calls[:2]), calls[2:]) == (["first", "second"], ["trackers"])
