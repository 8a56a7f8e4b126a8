"""What the processes of the trainers' tests do: real trainers, tiny models, and a rank that stops for a while."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from loop_jobs import Pause
from resync_jobs import SETTINGS
from tailbound.torch import GradScaler, TailboundState
from torch_jobs import batch, digest, loss, patient, refused

RANKS = 3
#: Steps: of the job, the one before which the last rank stops, and the one before which all save and evaluate.
STEPS, STOP, MEET = 20, 4, 16
#: MiB of a ring: it holds what the last rank misses, or not.
RINGS = {"behind": 8.0, "lost": 0.5}


def options(away: str) -> dict[str, Any]:
    return patient(SETTINGS, deadline_ms=(150.0, 150.0), resync_share=50.0, ring_mib=RINGS[away])


def as_torchrun(rank: int, ranks: int = RANKS) -> None:
    """The variables that trainers look for."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "test", "HF_HUB_OFFLINE": "1"}


#: Ranks whose gradients overflow, by step, where a scaler scales the loss: it is lowered twice, and one step left out.
ILL = {1: (0, 1, 2), 3: (2,)}
SCALE = 2.0**10


def scaler() -> torch.amp.GradScaler:
    """What a trainer makes on a GPU for half precision."""
    return torch.amp.GradScaler("cpu", SCALE, growth_interval=100)


def loss_of(net: nn.Module, rank: int, step: int) -> torch.Tensor:
    return loss(net, rank, step) * (float("inf") if rank in ILL.get(step, ()) else 1.0)


def lowered(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """In the end: by all overflows, of all ranks, and only that step was left out in which all overflow."""
    assert type(scaler) is GradScaler
    assert scaler.get_scale() == SCALE / 4
    (made,) = {int(kept["step"]) for kept in optimizer.state.values()}
    assert made == STEPS - 1


class Watch:
    """Of one rank: stops the last one for a while, and notes whether it holds."""

    def __init__(self, rank: int) -> None:
        self.begins = Pause(rank, STOP, False, still=5.0).reach
        self.held: dict[str, bool] = {}
        self.saved = self.file = ""

    def note(self, what: str, state: TailboundState | None) -> None:
        """Also once it does not hold."""
        assert state is not None
        self.held[what] = self.held.get(what, True) and state._within > 0

    def compare(self, net: nn.Module, load: Callable[[], dict[str, torch.Tensor]]) -> None:
        """What this rank holds, with the file that rank 0 has written before."""
        dist.barrier()
        file, mine = load(), dict(net.named_parameters())
        both = file.keys() & mine.keys()
        assert len(both) > 5
        self.saved, self.file = (digest({name: held[name] for name in both}) for held in (mine, file))

    def told(self, state: TailboundState | None, said: list[Any], net: nn.Module, **more: Any) -> dict[str, Any]:
        """The warnings are Tailbound's; ``whole``: how often another's state was taken as a whole."""
        assert state is not None
        return {
            "held": self.held, "saved": self.saved, "file": self.file,
            "said": [text for one in said if (text := str(one.message)).startswith("in ")],
            "end": digest(dict(net.named_parameters())),
            "whole": state.stats()["replica"]["counters"].get("whole_taken", 0), **more,
        }  # fmt: skip


def transformers(rank: int, folder: Path, away: str) -> dict[str, Any]:
    """A causal language model, with the defaults of ``TrainingArguments`` as far as they matter."""
    as_torchrun(rank)
    from safetensors.torch import load_file
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from tailbound.integrations.transformers import TailboundCallback

    torch.manual_seed(0)
    net = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2))
    watch, callback = Watch(rank), TailboundCallback(**options(away))
    wrapped: list[Any] = []

    class Watching(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.begins(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            wrapped[:] = [trainer.model_wrapped]

        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.note("evaluation", callback.state)

        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.note("log", callback.state)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.note("save", callback.state)
            if state.global_step == MEET:
                watch.compare(net, lambda: load_file(folder / f"checkpoint-{MEET}" / "model.safetensors"))

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
        trainer.train()
    (ddp,) = wrapped
    set_false = (ddp.find_unused_parameters, ddp.broadcast_buffers, arguments.average_tokens_across_devices)
    assert set_false == (False, False, False)
    return watch.told(callback.state, said, net, rate=trainer.lr_scheduler.get_last_lr())


def network() -> nn.Module:
    """About as large as the language model, with buffers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 512), nn.BatchNorm1d(512), nn.Tanh(), nn.Linear(512, 160), nn.Linear(160, 10))


def lightning(rank: int, folder: Path, away: str) -> dict[str, Any]:
    """A module that logs its loss by epoch, with a scheduler by step; an epoch ends by validation and a checkpoint."""
    as_torchrun(rank)
    import pytorch_lightning as pl
    from pytorch_lightning.plugins.precision import MixedPrecision
    from pytorch_lightning.strategies import DDPStrategy

    from tailbound.integrations.lightning import TailboundCallback

    watch, callback, net = Watch(rank), TailboundCallback(**options(away)), network()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, _: Any, index: int) -> torch.Tensor:
            loss = loss_of(self.net, rank, self.global_step)
            self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, _: Any, index: int) -> None:
            self.net(batch(0, index)[0])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    class Watching(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            reduce = trainer.strategy.reduce
            trainer.strategy.reduce = lambda *a, **k: (watch.note("log", callback.state), reduce(*a, **k))[1]

        def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            if trainer.current_epoch:
                watch.compare(module, lambda: torch.load(next(folder.glob("*.ckpt")))["state_dict"])

        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            watch.begins(trainer.global_step)

        def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if not trainer.sanity_checking:
                watch.note("evaluation", callback.state)

        def on_save_checkpoint(self, *_: Any) -> None:
            watch.note("save", callback.state)

    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = pl.Trainer(
            max_steps=STEPS, accelerator="cpu", devices=RANKS, strategy=DDPStrategy(process_group_backend="gloo"),
            plugins=[MixedPrecision("16-mixed", "cpu", scaler())], gradient_clip_val=1.0,
            use_distributed_sampler=False, default_root_dir=folder, callbacks=[
                callback, Watching(), pl.callbacks.ModelCheckpoint(folder)
            ], **quiet,
        )  # fmt: skip
        loader = torch.utils.data.DataLoader(range(MEET))
        trainer.fit(Module(), loader, torch.utils.data.DataLoader(range(2)))
    lowered(trainer.precision_plugin.scaler, trainer.optimizers[0])
    return watch.told(callback.state, said, net, rate=trainer.lr_scheduler_configs[0].scheduler.get_last_lr())


def accelerate(rank: int, folder: Path, away: str) -> dict[str, Any]:
    """A loop by hand, which gathers its loss and saves the accelerator's state."""
    as_torchrun(rank)
    from accelerate import Accelerator
    from safetensors.torch import load_file

    from tailbound.integrations.accelerate import register

    accelerator, watch, net, loss = Accelerator(cpu=True), Watch(rank), network(), torch.zeros(())
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    accelerator.scaler = scaler()
    ddp, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    gather = accelerator.gather
    accelerator.gather = lambda values: (watch.note("log", state), gather(values))[1]
    accelerator.register_save_state_pre_hook(lambda *_: watch.note("save", state))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        state = register(accelerator, ddp, optimizer, **options(away))
        for step in range(STEPS):
            if step == MEET:
                accelerator.gather(loss.detach())
                with state.hold():
                    watch.note("evaluation", state)
                    accelerator.save_state(folder)
                watch.compare(net, lambda: load_file(folder / "model.safetensors"))
            watch.begins(step)
            loss = loss_of(ddp, rank, step)
            accelerator.backward(loss)
            accelerator.scaler.unscale_(optimizer.optimizer)  # as accelerator.clip_grad_norm_ does on a GPU
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        lowered(accelerator.scaler, optimizer.optimizer)
        accelerator.end_training()
    return watch.told(state, said, net, rate=scheduler.get_last_lr())


def elastic(rank: int) -> None:
    """All of them refuse a job whose ranks may come back."""
    as_torchrun(rank, 2)
    from accelerate import Accelerator

    from tailbound.integrations import accelerate, lightning, transformers

    starts = {
        "Lightning": lightning.TailboundCallback,
        "Hugging Face": transformers.TailboundCallback,
        "Accelerate": lambda: accelerate.register(Accelerator(cpu=True), nn.Linear(2, 2), None),
    }
    for name, start in starts.items():
        text = refused("calls all_gather, all_reduce, broadcast and barrier", start)
        assert name in text
        assert "torch.distributed.init_process_group" in text
