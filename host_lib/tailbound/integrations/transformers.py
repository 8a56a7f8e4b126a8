"""The Hugging Face Trainer over Tailbound: ``Trainer(..., callbacks=[TailboundCallback()])``."""

from __future__ import annotations

import sys
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from tailbound.errors import ConfigError
from tailbound.integrations.training import Training

#: A log line gathers the loss; what comes less often than this costs little.
_OFTEN = 50


class TailboundCallback(Training, TrainerCallback):
    """Averages gradients by Tailbound; give it to ``Trainer``, as the last of ``callbacks``.

    It sets what would hold all ranks in every step, as far as the arguments leave that open, and warns of the rest. The
    ranks hold while they log, evaluate and save. They are made equal before they evaluate or save, and at the end:
    within two minutes, and a rank that does not come is waited for one.

    Args:
        **options: of ``tailbound.torch.register``.

    Raises:
        ConfigError: the job is elastic; from ``train``: DDP does not wrap the model, or it cannot be registered.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__("the Hugging Face Trainer", options)

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """DDP is not built yet: its options may be changed."""
        if args.ddp_find_unused_parameters is None and args.world_size > 1:
            args.ddp_find_unused_parameters = False  # which older Trainers read as they build DDP
            if (ddp := self._owner().accelerator.ddp_handler) is not None:
                ddp.find_unused_parameters = False
            self.has_set("ddp_find_unused_parameters=False")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """DDP and the optimizer are there, a checkpoint has been loaded, and no step has been made."""
        if args.world_size == 1:
            return
        trainer = self._owner()
        if args.average_tokens_across_devices and trainer.model_accepts_loss_kwargs:
            args.average_tokens_across_devices = False
            self.has_set("average_tokens_across_devices=False, so a rank's loss is the mean of its own tokens")
        if args.include_num_input_tokens_seen != "no":
            self.warn("include_num_input_tokens_seen gathers a number for every batch: leave it out")
        if "Dispatcher" in type(given["train_dataloader"]).__name__:
            self.warn('rank 0 sends every batch to all: pass accelerator_config={"dispatch_batches": False}')
        if args.logging_strategy == IntervalStrategy.STEPS and state.logging_steps < _OFTEN:
            self.warn(f"the loss is gathered every {state.logging_steps} steps: raise logging_steps")
        self.begin(
            trainer.model_wrapped,
            given["optimizer"],
            trainer.accelerator.scaler,
            {"lr_scheduler": given["lr_scheduler"]},
            "leave out fsdp= and deepspeed=, and start one process for each device by torchrun",
            buffers=args.ddp_broadcast_buffers is not None,
        )

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """A batch begins."""
        self.resume()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The optimizer has stepped. The Trainer may log, evaluate and save next."""
        if control.should_log or control.should_evaluate or control.should_save:
            self.pause(equal=control.should_evaluate or control.should_save)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """As after a step; after the last epoch the Trainer gathers in any case."""
        self.pause(equal=control.should_evaluate or control.should_save)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The last step is over, and the best model is loaded if that is asked for."""
        self.end()
        trainer: Any = self._owner()
        trainer.model_wrapped = trainer.model  # the next ``train`` wraps it anew: a hook of DDP cannot be replaced

    def _owner(self) -> Trainer:
        """The Trainer that is calling this callback, which it gives to none.

        Raises:
            ConfigError: there is none.
        """
        frame: Any = sys._getframe(1)
        while frame is not None:
            caller, frame = frame.f_locals.get("self"), frame.f_back
            if isinstance(caller, Trainer) and self in caller.callback_handler.callbacks:
                return caller
        raise ConfigError("TailboundCallback is called by no Trainer: give it to one, Trainer(callbacks=[...])")
