"""The Hugging Face Trainer over Tailbound: ``Trainer(..., callbacks=[TailboundCallback()])``."""

from __future__ import annotations

import sys
from typing import Any, cast

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import IntervalStrategy
except ImportError as error:
    raise ImportError(
        "tailbound.integrations.transformers needs the Hugging Face Trainer: pip install 'transformers[torch]'"
    ) from error

from tailbound.errors import ConfigError
from tailbound.integrations.training import Training
from tailbound.torch import TailboundState

#: A log line gathers the loss; what comes less often than this costs little.
_OFTEN = 50


class TailboundCallback(TrainerCallback):
    """Averages gradients by Tailbound; give it to ``Trainer``, as the last of ``callbacks``.

    It sets what would hold all ranks in every step, as far as the arguments leave that open, and warns of the rest. The
    ranks hold while they log, evaluate and save. They are made equal before they evaluate or save, and at the end.

    Args:
        **options: of ``tailbound.torch.register``.

    Raises:
        ConfigError: the job is elastic; from ``train``: DDP does not wrap the model, or it cannot be registered.
    """

    def __init__(self, **options: Any) -> None:
        self._training = Training("the Hugging Face Trainer", "all_gather, broadcast and barrier", options)

    @property
    def state(self) -> TailboundState | None:
        """Of the model, once training has begun; it keeps its ``stats()`` when training has ended."""
        return self._training.state

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """DDP is not built yet: its options may be changed."""
        ddp = self._owner().accelerator.ddp_handler
        if ddp is not None and ddp.find_unused_parameters and args.ddp_find_unused_parameters is None:
            ddp.find_unused_parameters = False
            self._training.done.append("ddp_find_unused_parameters=False")

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        """DDP and the optimizer are there, a checkpoint has been loaded, and no step has been made."""
        if args.world_size == 1:
            return
        trainer, training = self._owner(), self._training
        if args.average_tokens_across_devices and trainer.model_accepts_loss_kwargs:
            args.average_tokens_across_devices = False
            training.done.append("average_tokens_across_devices=False, so a rank's loss is the mean of its own tokens")
        if args.include_num_input_tokens_seen != "no":
            training.left.append("include_num_input_tokens_seen gathers a number for every batch: leave it out")
        if "Dispatcher" in type(train_dataloader).__name__:
            training.left.append(
                'rank 0 sends every batch to all ranks: pass accelerator_config={"dispatch_batches": False}'
            )
        if args.logging_strategy == IntervalStrategy.STEPS and state.logging_steps < _OFTEN:
            training.left.append(f"the loss is gathered every {state.logging_steps} steps: raise logging_steps")
        training.buffers_open = args.ddp_broadcast_buffers is None
        training.begin(
            trainer.model_wrapped,
            optimizer,
            trainer.accelerator.scaler,
            {"lr_scheduler": lr_scheduler} if lr_scheduler is not None else {},
            "leave out fsdp= and deepspeed=, and start one process for each device by torchrun",
        )
        training.report()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """A batch begins."""
        self._training.resume()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The optimizer has stepped. The Trainer may log, evaluate and save next."""
        if control.should_log or control.should_evaluate or control.should_save:
            self._training.pause(equal=control.should_evaluate or control.should_save)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """As after a step; after the last epoch the Trainer gathers in any case."""
        self._training.pause(equal=control.should_evaluate or control.should_save)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The last step is over, and the best model is loaded if that is asked for."""
        self._training.end()
        trainer = self._owner()
        trainer.model_wrapped = cast(
            Any, trainer.model
        )  # the next ``train`` wraps it anew; a hook of DDP cannot be replaced

    def _owner(self) -> Trainer:
        """The Trainer that is calling this callback, which it gives to none.

        Raises:
            ConfigError: there is none.
        """
        frame = sys._getframe(1)
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, Trainer) and self in caller.callback_handler.callbacks:
                return caller
            frame = cast(Any, frame.f_back)
        raise ConfigError("TailboundCallback is called by no Trainer: give it to one, Trainer(callbacks=[...])")
