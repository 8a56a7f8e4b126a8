"""From the name of a rival to what averages a buffer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from tailbound.errors import ConfigError
from tailbound_lab.bench.rivals import RIVALS
from tailbound_lab.bench.rivals.exchange import Exchange
from tailbound_lab.bench.rivals.quantised import Quantised
from tailbound_lab.bench.rivals.schedules import Schedule, halving_doubling, parameter_server, ring
from tailbound_lab.bench.rivals.stragglar import stragglar

#: Makes a buffer of float32 the mean of all ranks'.
Averager = Callable[[torch.Tensor], None]


def schedule_of(name: str, ranks: int, straggler: int) -> Schedule:
    """The schedule of a rival that has one.

    Raises:
        ConfigError: none of that name, or for so many ranks.
    """
    if name == "stragglar":
        return stragglar(ranks, straggler)
    makers = {"ring": ring, "halving": halving_doubling, "server": parameter_server}
    if name not in makers:
        raise ConfigError(f"{name!r} is no rival: give one of {', '.join(RIVALS)}")
    return makers[name](ranks)


def averager(name: str, numel: int, group: dist.ProcessGroup, straggler: int | None = None) -> Averager:
    """What averages buffers of ``numel`` entries as ``name`` does.

    Args:
        name: of ``RIVALS``.
        numel: entries of float32.
        group: Gloo's; all ranks of it average, and nobody else sends in it.
        straggler: whom StragglAR expects to be late; None: the last rank.

    Raises:
        ConfigError: see ``schedule_of``.
    """
    if name == "quantised":
        return Quantised(numel, group).mean
    ranks = group.size()
    exchange = Exchange(schedule_of(name, ranks, ranks - 1 if straggler is None else straggler), numel, group)

    def mean(buffer: torch.Tensor) -> None:
        exchange.sum(buffer)
        buffer.mul_(1 / ranks)

    return mean
