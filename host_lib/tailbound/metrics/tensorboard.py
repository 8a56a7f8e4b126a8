"""``stats()`` for TensorBoard: ``write(writer, state.stats(), step)``, every hundred steps or so.

``writer`` is your ``torch.utils.tensorboard.SummaryWriter`` (the extra ``tensorboard``), or whatever has its
``add_scalar``: Lightning's ``logger.experiment``, Accelerate's tracker. Let every rank write into a folder of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from tailbound.metrics.flatten import PREFIX, Metric, by_path, flatten

#: What labels say of the whole run, and the folder says too.
_OF_THE_RUN = ("rank", "job")
#: Parts of ``stats()`` that a status does not have.
_OF_THE_MODEL = ("replica",)


class Writer(Protocol):
    """The part of ``SummaryWriter`` that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Writes one value."""


def write(writer: Writer, stats: Mapping[str, Any], step: int, *, only: Collection[str] = ()) -> int:
    """Writes metrics of one rank as scalars.

    Args:
        writer: where to.
        stats: as ``stats()`` returns it.
        step: of the training.
        only: names (``tailbound_op_seconds``, ...); empty: all of them.

    Returns:
        How many were written.
    """
    found = [*flatten(stats["status"]), *by_path(stats, *_OF_THE_MODEL)]
    chosen = [metric for metric in found if not only or metric.name in only]
    for metric in chosen:
        writer.add_scalar(tag_of(metric), metric.value, step)
    return len(chosen)


def tag_of(metric: Metric) -> str:
    """A tag that puts metrics of a name into one group: ``tailbound/peer_rtt_seconds/peer=2``."""
    labels = [f"{name}={value}" for name, value in metric.labels.items() if name not in _OF_THE_RUN]
    return "/".join([PREFIX.rstrip("_"), metric.name.removeprefix(PREFIX), *labels])
