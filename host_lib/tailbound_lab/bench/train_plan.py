"""What ``tailbound bench train`` is to train: scenarios with their defaults, and the user's changes to them. Pure."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tailbound.errors import ConfigError
from tailbound.settings.table import ADVANCED
from tailbound_lab.lab.spec import LabSpec

#: In the order in which they have their first turn (``variants``). TCP carries the averages of all but the last.
VARIANTS = ("gloo", "fp16", "powersgd", "quantised", "tailbound")
#: Images of the digits that are trained on.
IMAGES = 1437
#: Steps that change nothing before those that count, Tailbound's and the others'. DDP makes its buckets anew after the
#: first; Tailbound learns scales, and deadlines from 20 ops of a size.
WARMUP_OURS, WARMUP_THEIRS = 12, 3


@dataclass(frozen=True)
class Scenario:
    """Trainings of one model in one network.

    Attributes:
        name: of ``SCENARIOS``.
        model: ``digits`` or ``gpt``.
        batch: images or pieces of text a rank and step.
        steps: of every variant, with every seed.
        turn: steps in a row of one variant.
        look: turns between looks at the accuracy.
        learning_rate, momentum: of SGD; no momentum (None): of AdamW.
        rate: of every link in bit/s; None: as fast as the machine.
        losses: probabilities with which packets are lost; each gets a lab of its own.
        variants: who is trained.
        seeds: of data, weights and losses.
        workers: ranks.
        seconds: of training, all variants together, after which no new round of turns begins; with every seed.
        data: ``digits`` or ``text``.
        tails: P99/P50 that foreign bursts give Gloo's all-reduces of 25 MiB; None: there are no bursts.
        calibration: seconds for which the bursts of a tail are measured; three times as long at most.
        device: ``cpu`` or ``cuda``: what it is trained on.
    """

    name: str
    model: str
    batch: int
    steps: int
    turn: int
    look: int
    learning_rate: float
    momentum: float | None
    rate: int | None = 10**9
    losses: tuple[float, ...] = (0.0,)
    variants: tuple[str, ...] = VARIANTS
    seeds: tuple[int, ...] = (1, 2, 3)
    workers: int = 4
    seconds: float = 3600.0
    data: str = "digits"
    tails: tuple[float | None, ...] = (None,)
    calibration: float = 60.0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.workers < 2 or self.batch < 1 or self.workers * self.batch > IMAGES:
            raise ConfigError(
                f"{self.workers} workers with {self.batch} images each: give at least 2 workers, one image each, and "
                f"at most {IMAGES} images in all"
            )
        for loss in self.losses:
            LabSpec(self.workers, rate=self.rate, loss=loss)
        if any(tail is not None and (tail <= 1 or self.rate is None) for tail in self.tails):
            raise ConfigError("a tail (P99 over P50) is above 1, and its bursts need links with a rate: give --rate")

    def variants_at(self, loss: float) -> tuple[str, ...]:
        """Who is trained where packets are lost with this probability.

        TCP's averages do not depend on losses, so those at the first loss hold for all.
        """
        chosen = [v for v in VARIANTS if v in self.variants]
        return tuple(v for v in chosen if v == "tailbound" or loss == self.losses[0])


SCENARIOS = {
    "accuracy": Scenario(
        "accuracy", "digits", batch=16, steps=8 * (IMAGES // 64), turn=11, look=1, losses=(0.0, 0.01, 0.05),
        variants=("gloo", "fp16", "powersgd", "tailbound"), learning_rate=0.01, momentum=0.9, rate=None,
    ),
    "tails-gpt": Scenario(
        "tails-gpt", "gpt", batch=2, steps=100, turn=4, look=100, learning_rate=5e-4, momentum=None, data="text",
        tails=(1.5, 3.0),
    ),
    "tails-conv": Scenario(
        "tails-conv", "digits", batch=16, steps=6 * (IMAGES // 64), turn=11, look=1, learning_rate=0.01, momentum=0.9,
        tails=(1.5, 3.0),
    ),
}  # fmt: skip
#: Of its steps a quick run does one in so many.
_QUICK = 8


def plan(names: Iterable[str] = ("accuracy",), *, quick: bool = False, **changes: Any) -> list[Scenario]:
    """The scenarios to run.

    Args:
        names: of ``SCENARIOS``.
        quick: fewer steps, one seed.
        **changes: fields of ``Scenario`` for all of them; None: as they are; a ``rate`` of 0: as fast as the machine.

    Raises:
        ConfigError: what cannot be.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    if given.get("rate") == 0:
        given["rate"] = None
    chosen = [SCENARIOS[name] for name in names]
    if quick:
        chosen = [replace(one, steps=one.steps // _QUICK, seeds=(1,), calibration=10.0) for one in chosen]
    return [replace(one, **given) for one in chosen]


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Options of ``TailboundState`` written ``NAME=VALUE``, values as Python writes them or plain words.

    Raises:
        ConfigError: no ``=``, or no name before it.
    """
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip().isidentifier():
            raise ConfigError(f"option {text!r} is not NAME=VALUE: write for example bits=16 or result=peers")
        into = options.setdefault("advanced", {}) if name.strip() in ADVANCED else options
        try:
            into[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            into[name.strip()] = value.strip()
    return options
