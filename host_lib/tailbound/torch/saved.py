"""What of a state goes into a checkpoint: plain types, which ``torch.load(weights_only=True)`` takes.

Little is worth it. Scales of the codec, deadlines and owner maps are those of one network and one set of ranks, and are
learned anew within a few steps. A gradient that came too late and waits for the next step is worth half a contribution
of one rank. What remains is where a rank stands in its data, and what was counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tailbound.errors import ConfigError

if TYPE_CHECKING:
    from tailbound.torch.recovery import Recovery

#: Of the layout of ``state_dict``.
FORMAT = 1
#: Counters of a run that are kept (``stats()["counters"]``).
_KEPT = ("ops", "ops_incomplete", "ops_late", "rows_expected", "rows_delivered", "abstained", "steps_applied")


def save(state: Recovery, counters: Mapping[str, int]) -> dict[str, Any]:
    """``state`` as numbers, strings, lists and dicts of them."""
    run = {"ranks": state.ranks} | {name: int(counters.get(name, 0)) for name in _KEPT}
    return {
        "format": FORMAT,
        "rank": state.rank,
        "ranks": state.ranks,
        "owed_batches": state.owed_batches,
        "history": [*state.history, run],
    }


def restore(state: Recovery, saved: Mapping[str, Any]) -> None:
    """Takes in what ``save`` gave, maybe on another rank or in a world of another size.

    Batches still to be skipped belong to one rank's part of the data, which is another one when the world is.

    Raises:
        ConfigError: it is not from ``save``, or from a newer version.
    """
    try:
        known, rank, ranks = int(saved["format"]), int(saved["rank"]), int(saved["ranks"])
        owed, history = int(saved["owed_batches"]), [dict(run) for run in saved["history"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"this is no state of Tailbound ({error!r}): give what state_dict() returned") from error
    if known > FORMAT:
        raise ConfigError(f"this state has format {known}, of a newer version (known: {FORMAT}): install that version")
    state.history = history
    if (rank, ranks) == (state.rank, state.ranks):
        state.owed_batches = owed
