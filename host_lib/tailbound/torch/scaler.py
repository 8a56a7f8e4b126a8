"""A gradient scaler for ranks that average (clock-25).

``torch.amp.GradScaler`` looks for Inf and NaN in the gradients that it is given. Under Tailbound these are finite: a
rank whose own gradient is not stays out of the average, and would never back off. So torch's own scaler is never left
to itself: one that steps the model (in Lightning or Accelerate, say) becomes one of these, by ``register(scaler=...)``
or when it is found at work in the first step. Where a rank has missed an overflow, scales differ by powers of two only,
so that unscaled averages have the same bits.
"""

from __future__ import annotations

import logging
import math
from typing import Any, TypeAlias

import torch

from tailbound.errors import ConfigError
from tailbound.torch.compat import SCALERS

TailboundState: TypeAlias = Any  # of ``state``, which imports this module


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a model that ``register`` has put under Tailbound; used in the same way.

    Args:
        state: what ``register`` returned.
        device, arguments, options: as torch's ``device``, ``init_scale``, ``growth_factor``, ``backoff_factor``,
            ``growth_interval`` and ``enabled``, equal on all ranks; both factors are powers of two.

    Raises:
        ConfigError: other factors, the state has a scaler already, or only one of several shards of its model (FSDP).
    """

    def __init__(self, state: TailboundState, device: str = "cpu", *arguments: Any, **options: Any) -> None:
        super().__init__(device, *arguments, **options)
        self._join(state)

    def _join(self, state: TailboundState) -> None:
        """From now on this scales the loss of ``state``."""
        if not hasattr(state, "loss_scale"):
            raise ConfigError(f"GradScaler({state!r}): give what register returned, as in GradScaler(state, 'cuda')")
        if state.scaler is not None:
            raise ConfigError("this state has a gradient scaler already: use one for all optimizers of the model")
        self._ours = self.is_enabled() and state.communicator is not None
        if self._ours and state.shards > 1 and not state.shares_scale:
            raise ConfigError(
                f"each of the {state.shards} shards of this model is averaged by a job of its own, with a loss scale "
                "of its own, and a host would add gradients of different scales: train in bfloat16, without a scaler"
            )
        if self._ours:
            _check_factors(self.get_growth_factor(), self.get_backoff_factor())
        self._state = state
        if self._ours:
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(torch.device(self._device))
            state.scaler, state.loss_scale = self, self.get_scale()

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As in torch; the optimizer does not step where all ranks overflowed, which left zeros for gradients."""
        if self._ours and self._state.overflowed and self._state.steps.void:
            self._check_inf_per_device(optimizer)  # ``update`` wants that to have been looked for
            self._state.steps.over()
            return None
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """As in torch; a step in which some rank's gradients overflowed counts as one with infinite gradients.

        A scale of 1 is lowered no more: gradients that are not finite then are not so for its sake.
        """
        if not self._ours:
            super().update(new_scale)
            return
        before = self._state.loss_scale
        self._state.steps.over()
        if self._state.overflowed and before > 1:
            for one in self._per_optimizer_states.values():
                for found in one["found_inf_per_device"].values():
                    found.fill_(1.0)
        self._state.overflowed = False
        super().update(new_scale)
        self._state.loss_scale = scale = self.get_scale()
        if new_scale is None and scale < before:
            text = f"gradients overflow at a loss scale of {before:g}: now {scale:g}"
            self._state.say("overflow", text, logging.INFO)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; states of torch's own scaler fit. Factors that are no powers of two are a ``ConfigError``."""
        if self._ours:
            _check_factors(state_dict.get("growth_factor", 2.0), state_dict.get("backoff_factor", 0.5))
        super().load_state_dict(state_dict)
        if self._ours:
            self._state.loss_scale = self.get_scale()

    def close(self) -> None:
        """The state ends: scales as torch's own from now on, until another one takes it in (``adopt``)."""
        self._ours = False


def _check_factors(growth: float, backoff: float) -> None:
    """Raises a ``ConfigError`` for factors by which scales of ranks could differ otherwise than by powers of two."""
    if any(math.frexp(factor)[0] != 0.5 for factor in (growth, backoff)):
        raise ConfigError(
            f"a loss scale that grows by {growth:g} and backs off by {backoff:g} rounds gradients otherwise on each "
            "rank: give powers of two, as growth_factor=2.0, backoff_factor=0.5"
        )


def adopt(state: TailboundState, scaler: torch.amp.GradScaler) -> None:
    """Makes ``scaler``, torch's own, one of ours in its place, before the same step on all ranks.

    Raises:
        ConfigError: it is of another kind, or of another job that is not over; or see ``GradScaler``.
    """
    if not scaler.is_enabled() or (isinstance(scaler, GradScaler) and scaler._state is state):
        return
    if isinstance(scaler, GradScaler) and not scaler._ours:  # its job is over, or was one rank's
        scaler._join(state)
        return
    if type(scaler) not in SCALERS:
        kind = type(scaler)
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} scales the loss of a registered model, and cannot see which ranks "
            "overflow: use tailbound.torch.GradScaler(state), one for each registered model"
        )
    before, scaler.__class__ = type(scaler), GradScaler
    try:
        scaler._join(state)  # type: ignore[attr-defined]
    except BaseException:
        scaler.__class__ = before
        raise
