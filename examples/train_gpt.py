"""A language model of GPT-2's shape, 124 million parameters, with AdamW, bf16 and gradient accumulation.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --small
    tailbound lab run --workers 2 --loss 0.01 -- python examples/train_gpt.py --steps 20

It learns to write Python: the text is the source of Python's own standard library, cut into words. Without ``--small``
a rank takes about 4 GiB of memory. ``--plain`` leaves Tailbound out, to compare.
"""

import argparse
import collections
import contextlib
import math
import re
import resource
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import tailbound.torch


class Shape(NamedTuple):
    """Of a model: different tokens, how many of them it looks back on, layers, heads of attention, and width."""

    tokens: int
    context: int
    layers: int
    heads: int
    width: int


GPT2 = Shape(tokens=50257, context=1024, layers=12, heads=12, width=768)
SMALL = Shape(tokens=1024, context=64, layers=2, heads=2, width=64)


class Block(nn.Module):
    """A layer: attention, and a perceptron for every token. x is f32[batch, length, width]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer makes of ``x``."""
        batch, length, width = x.shape
        heads = self.attend(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(nn.functional.gelu(self.widen(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 (Radford et al., 2019), without dropout; the last layer is the embedding of the tokens, as there."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(shape.tokens, shape.width), nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                deep = name.endswith(("project.weight", "narrow.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * shape.layers) if deep else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Mean loss of telling ``following`` from ``tokens``, both i64[batch, length]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.token(tokens) + self.place(places)))
        return cross_entropy((x @ self.token.weight.T).flatten(0, 1).float(), following.flatten())


def text(most: int) -> torch.Tensor:
    """The standard library as numbers below ``most``, i64[about 3 million]; 0 stands for all the rarest words."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in library.rglob("*.py") if not {"site-packages", "test"} & set(p.parts))
    words = re.findall(r"\w+|[^\w\s]+|\s+", "".join(file.read_text("utf-8", "ignore") for file in files))
    known = [word for word, _ in collections.Counter(words).most_common(most - 1)]
    number = {word: n for n, word in enumerate(known, start=1)}
    return torch.tensor([number.get(word, 0) for word in words])


def pieces(of: torch.Tensor, count: int, batch: int, length: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """``count`` pairs of i64[batch, length], tokens and those that follow, from random places; other ones by rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(count):
        starts = torch.randint(len(of) - length, (batch, 1), generator=generator)
        whole = of[starts + torch.arange(length + 1)]
        yield whole[:, :-1], whole[:, 1:]


def main() -> None:
    """Trains, and says for every step the loss of this rank and the seconds that it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a model of 170,000 parameters, for a first try")
    parser.add_argument("--plain", action="store_true", help="average by the process group, as DDP does")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=1, help="pieces of text in one pass")
    parser.add_argument("--length", type=int, default=64, help="words of a piece")
    parser.add_argument("--accumulate", type=int, default=2, help="passes in one step")
    asked = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = GPT(SMALL if asked.small else GPT2)
    # gradient_as_bucket_view saves 4 bytes a parameter: DDP's buckets are the gradients. Averages come into them, too.
    net = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    state = None if asked.plain else tailbound.torch.register(net, optimizer=optimizer)

    def update() -> None:
        """What follows the backward pass of a step."""
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    def skip(steps: int) -> None:
        """This rank has taken over the state of others, who are so many steps ahead."""
        for _ in range(steps):
            schedule.step()

    batches = pieces(text(model.token.num_embeddings), asked.steps * asked.accumulate, asked.batch, asked.length)
    if state is not None:  # a rank that was stopped applies what the others have made meanwhile, and skips its batches
        batches = tailbound.torch.batches(batches, state, step=update, on_skip=skip, per_step=asked.accumulate)
    rank, loss, begin = dist.get_rank(), 0.0, time.monotonic()
    for number, (tokens, following) in enumerate(batches, start=1):
        last = number % asked.accumulate == 0
        # Nothing is sent before the last pass of a step; it averages the sum of all.
        with contextlib.nullcontext() if last else net.no_sync():
            with torch.autocast("cpu", torch.bfloat16):  # matrices in bf16; parameters and gradients stay float32
                part = net(tokens, following) / asked.accumulate
            part.backward()
        loss += part.item()
        if last:
            update()
            optimizer.zero_grad()
            print(
                f"rank {rank}: step {number // asked.accumulate}: loss {loss:.4f}, {time.monotonic() - begin:.2f} s",
                flush=True,
            )
            loss, begin = 0.0, time.monotonic()

    count = sum(p.numel() for p in model.parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    how = "by the process group"
    if state is not None:
        state.synchronize()
        stats = state.stats()
        how = f"over {stats['datapath']}, {stats['delivered']:.2%} of the rows delivered"
        state.close()
    print(f"rank {rank}: {count / 1e6:.1f} M parameters averaged {how}; at most {peak / 2**20:.0f} MiB of memory")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
