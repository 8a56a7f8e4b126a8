"""What the processes of the trainers' tests do: real trainers, tiny models, and a rank that stops for a while."""

from __future__ import annotations

import hashlib
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from resync_jobs import SETTINGS
from tailbound.torch import TailboundState
from torch_jobs import patient

RANKS = 3
#: Steps: of the job, the one before which the last rank stops, and the one after which all save and evaluate.
STEPS, STOP, MEET = 12, 4, 6
OPTIONS = patient(SETTINGS, deadline_ms=(150.0, 150.0), resync_share=50.0)


def as_torchrun(rank: int, ranks: int = RANKS) -> None:
    """The variables that trainers look for."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "test", "HF_HUB_OFFLINE": "1"}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    out = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        out.update(tensor.detach().numpy().tobytes())
    return out.hexdigest()


class Watch:
    """Of one rank: stops it, lets the test go on, and notes whether it holds."""

    def __init__(self, rank: int, ready: Any, moved: Any) -> None:
        self.rank, self.ready, self.moved = rank, ready, moved
        self.held: dict[str, bool] = {}
        self.saved = self.file = ""

    def begins(self, step: int) -> None:
        if step == STOP and self.rank == RANKS - 1:
            self.ready.set()
            os.kill(os.getpid(), signal.SIGSTOP)  # SIGCONT comes from the test

    def ends(self, step: int) -> None:
        if step == MEET - 1 and self.rank != RANKS - 1:
            self.moved.set()

    def note(self, what: str, state: TailboundState | None) -> None:
        """Also once it does not hold."""
        assert state is not None
        self.held[what] = self.held.get(what, True) and state._within > 0

    def told(self, state: TailboundState | None, said: list[Any], net: nn.Module, **more: Any) -> dict[str, Any]:
        assert state is not None
        return {
            "held": self.held, "saved": self.saved, "file": self.file, "said": [str(one.message) for one in said],
            "end": digest(dict(net.named_parameters())), "missing": state.last.missing, **more,
        }  # fmt: skip


def transformers(rank: int, folder: Path, ready: Any, moved: Any) -> dict[str, Any]:
    """A causal language model, with the defaults of ``TrainingArguments`` as far as they matter."""
    as_torchrun(rank)
    from safetensors.torch import load_file
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from tailbound.integrations.transformers import TailboundCallback

    torch.manual_seed(0)
    net = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2))
    watch, callback = Watch(rank, ready, moved), TailboundCallback(**OPTIONS)

    class Watching(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.begins(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.ends(state.global_step - 1)

        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.note("evaluation", callback.state)

        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.note("log", callback.state)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.note("save", callback.state)
            if state.global_step == MEET:
                dist.barrier()
                saved = load_file(Path(args.output_dir) / f"checkpoint-{MEET}" / "model.safetensors")
                mine = {name: p for name, p in net.named_parameters() if name in saved}
                assert len(mine) > 20
                watch.saved = digest(mine)
                watch.file = digest({name: saved[name] for name in mine})

    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=2, logging_steps=MEET, eval_strategy="steps",
        eval_steps=MEET, save_steps=MEET, use_cpu=True, report_to=[], disable_tqdm=True, learning_rate=1e-3,
        warmup_steps=STEPS // 2,
    )  # fmt: skip
    tokens = torch.randint(0, 64, (2 * RANKS * STEPS, 16), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = Trainer(net, arguments, train_dataset=rows, eval_dataset=rows[:12], callbacks=[Watching(), callback])
        wrapped: list[Any] = []
        begin = callback._training.begin
        callback._training.begin = lambda ddp, *rest: (wrapped.append(ddp), begin(ddp, *rest))[1]  # type: ignore
        trainer.train()
    ddp = wrapped[0]
    return watch.told(
        callback.state, said, net,
        options=(ddp.find_unused_parameters, ddp.broadcast_buffers, arguments.average_tokens_across_devices),
        rate=trainer.lr_scheduler.get_last_lr(),
    )  # fmt: skip
