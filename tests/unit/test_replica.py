"""State as bytes: all of it is in the slices once, and what is written is what was read."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from tailbound.errors import ConfigError, TransportError

pytest.importorskip("torch", reason="missing capability 'torch'")

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

from tailbound.torch.replica import SLICE_LEAST, Replica


def trained(seed: int, kind: str = "Adam", steps: int = 2) -> tuple[Any, Any, Any]:
    """A model with several types, layouts and a frozen part, its optimizer, and its replica."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(16), nn.Flatten(),
        nn.Linear(16 * 36, 300), nn.Linear(300, 300).double(),
    )  # fmt: skip
    net[4].bias.requires_grad_(False)
    optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.01)
    replica = Replica(net)
    assert replica.adopt(optimizer)
    assert replica.adopt(optimizer)
    for _ in range(steps):
        x = net[3](net[2](net[1](net[0](torch.randn(4, 3, 8, 8)))))
        net[4](x.double()).square().sum().backward()
        optimizer.step()
    replica.freeze()
    return net, optimizer, replica


def give(theirs: Any, mine: Any, *, unlike: bool = False) -> None:
    """All slices; ``unlike``: each differs."""
    for which in range(theirs.slices):
        assert mine.layout(which) == theirs.layout(which)
        assert not unlike or mine.digest(which) != theirs.digest(which)
        mine.write(which, memoryview(b"".join(theirs.copy(which))))
        assert mine.digest(which) == theirs.digest(which)


@pytest.mark.parametrize("kind", ["Adam", "Adafactor"])
def test_another_ranks_state_is_written_whole(kind: str) -> None:
    net, optimizer, mine = trained(1, kind)
    other, their_optimizer, theirs = trained(2, kind)
    assert mine.slices == theirs.slices > 4
    assert mine.slices & (mine.slices - 1) == 0
    give(theirs, mine, unlike=True)
    for a, b in zip((*net.parameters(), *net.buffers()), (*other.parameters(), *other.buffers()), strict=True):
        assert torch.equal(a, b)
        assert flattened(optimizer.state.get(a)) == flattened(their_optimizer.state.get(b))


def test_every_change_is_seen_in_the_digest_of_its_slice() -> None:
    _, _, replica = trained(4)
    rng = np.random.default_rng(4)
    for _ in range(40):
        which = int(rng.integers(0, replica.slices))
        views = replica.views(which)
        view = views[int(rng.integers(0, len(views)))]
        at, bit = int(rng.integers(0, view.size)), 1 << int(rng.integers(0, 8))
        before = [replica.digest(k) for k in range(replica.slices)]
        view[at] ^= bit
        after = [replica.digest(k) for k in range(replica.slices)]
        assert [a == b for a, b in zip(before, after, strict=True)] == [k != which for k in range(replica.slices)]
        view[at] ^= bit
        assert replica.digest(which) == before[which]


def test_a_rank_without_optimizer_state_gets_it() -> None:
    net, fresh_optimizer, fresh = trained(5, steps=0)
    _, optimizer, theirs = trained(6, steps=3)
    assert fresh.layout(0) != theirs.layout(0)
    with pytest.raises(TransportError, match="train the same model with the same optimizer"):
        fresh.write(0, memoryview(b"".join(theirs.copy(0))))
    optimizer.param_groups[0]["lr"] = 0.125
    fresh.arrange(theirs.describe())
    give(theirs, fresh)
    assert fresh_optimizer.param_groups[0]["lr"] == 0.125
    assert fresh_optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    fresh_optimizer.step()  # it can go on
    with pytest.raises(TransportError, match="by 1 optimizers, this one by 0"):
        Replica(net).arrange(theirs.describe())
    optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})  # the settings of a group got lost
    with pytest.raises(TransportError, match=r"Adam.* has 2 param_groups, this one's 1: make the same groups"):
        fresh.arrange(theirs.describe())


def test_a_foreign_optimizer_is_none_of_ours() -> None:
    net, _, replica = trained(9, steps=0)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], 0.1)
    assert not replica.adopt(other)
    assert len(replica.optimizers) == 1
    other.add_param_group({"params": [next(net.parameters())]})  # from now on it steps one of ours
    assert replica.adopt(other)
    assert replica.optimizers[-1] is other


class Preconditioned(torch.optim.Optimizer):
    """Keeps what Shampoo and SOAP keep: lists of matrices, None and numbers, and dicts of both."""

    def __init__(self, parameters: Any, lr: Any) -> None:
        super().__init__(parameters, {"lr": lr, "named": ["a", "b"]})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                count, last = state.get("step", 0) + 1, state.get("GG")
                matrices = [torch.full((n, n), float(p.grad.norm()) + count) for n in p.shape]
                state |= {"step": count, "first": count == 1, "exp_avg": p.grad * 0.1, "GG": matrices, "Q": last}
                state["by"] = {"norms": (torch.full((3,), float(count)), float(count)), 7: []}
                p.sub_(state["exp_avg"] * group["lr"])


def preconditioned(seed: int, steps: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    net = torch.nn.Linear(30, 20)
    optimizer = Preconditioned(net.parameters(), torch.tensor(0.01 * seed))
    replica = Replica(net, 4)
    replica.adopt(optimizer)
    for _ in range(steps):
        net.zero_grad()
        net(torch.randn(5, 30)).square().sum().backward()
        optimizer.step()
    replica.freeze()
    return optimizer, replica


def flattened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: flattened(part) for key, part in value.items()}
    return type(value)(flattened(part) for part in value) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("steps", [0, 3])
def test_lists_and_numbers_of_an_optimizer_arrive(steps: int) -> None:
    """Shampoo and SOAP keep matrices in lists and step counts in numbers; a learning rate may be a tensor."""
    mine_optimizer, mine = preconditioned(1, steps)
    their_optimizer, theirs = preconditioned(2, 3)
    rate = mine_optimizer.param_groups[0]["lr"]
    mine.arrange(theirs.describe())
    give(theirs, mine)
    for a, b in zip(mine.parameters, theirs.parameters, strict=True):
        assert flattened(mine_optimizer.state[a]) == flattened(their_optimizer.state[b])
        assert len(mine_optimizer.state[a]["GG"]) == a.ndim
    assert mine_optimizer.param_groups[0]["lr"] is rate  # a captured graph reads it there
    assert rate == their_optimizer.param_groups[0]["lr"]
    assert mine.describe() == theirs.describe()


def test_plain_values_are_part_of_a_layout_and_state_that_another_rank_no_longer_has_goes() -> None:
    """Slices carry tensors; where plain values differ, the slice is not the other rank's."""
    optimizer, replica = preconditioned(1, 3)
    before = [replica.layout(which) for which in range(replica.slices)]
    optimizer.state[replica.parameters[0]]["step"] += 1
    after = [replica.layout(which) for which in range(replica.slices)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, True, True, True]
    _fresh, theirs = preconditioned(2, 0)
    replica.arrange(theirs.describe())
    assert not any(optimizer.state[p] for p in replica.parameters)


@pytest.mark.parametrize(
    ("where", "kept", "name"),
    [
        ("window", deque([1.0]), r"Preconditioned.state\['window'\] is a deque"),
        ("deep", [0.0, {1, 2}], r"Preconditioned.state\['deep'\]\[1\] is a set"),
        ("all", 1.0, r"Preconditioned.state\['all'\] belongs to no parameter"),
        ("view", torch.zeros(4, 4)[:, 1], r"Preconditioned.state\['view'\] has holes"),
    ],
)
def test_what_cannot_be_given_is_refused_by_name(where: str, kept: Any, name: str) -> None:
    optimizer, replica = preconditioned(1, 1)
    state = optimizer.state[replica.parameters[0] if where != "all" else "all"]
    state[where] = kept
    with pytest.raises(ConfigError, match=name):
        replica.describe()
    replica.layout(0)


def test_buffers_are_found_whatever_their_names_are_in_a_state_dict() -> None:
    """Wrappers for checkpoints take their own part out of names; statistics in them were compared with nobody's."""

    class Own(nn.Module):
        def __init__(self, shared: Any) -> None:
            super().__init__()
            self.register_buffer("shared", shared)
            self.register_buffer("mine", torch.zeros(7), persistent=False)

    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    own = Own(inner[1].running_mean)
    replica = Replica(nn.Sequential(checkpoint_wrapper(inner), offload_wrapper(nn.BatchNorm1d(5)), own))
    assert [view.nbytes for view in replica.views(0)[6:]] == [16, 16, 8, 20, 20, 8]  # behind parameters
    before = replica.digest(0)
    inner[1].running_var.fill_(3.0)
    replica.freeze()
    assert replica.digest(0) != before


def test_a_buffer_may_change_its_shape_go_and_come_back() -> None:
    """The observer of a quantised model does so in its first pass, and training ended in the second."""
    net = torch.nn.Linear(2, 2)
    for name, value in (("scale", torch.ones(1)), ("late", None)):
        net.register_buffer(name, value)
    replica = Replica(net)

    def frozen() -> dict[str, list[float]]:
        replica.freeze()
        return {name: view.tolist() for name, view in replica._pieces(0) if name.startswith("b")}

    assert frozen() == {"b0": [1.0]}
    net.scale, net.late = torch.full((3,), 2.0), torch.zeros(2)
    assert replica.size(0) == 6 * 4 + 4  # as it was at the boundary
    replica.write(0, memoryview(bytearray(replica.size(0))))
    assert net.scale.tolist() == [2.0] * 3  # that of another shape is left
    assert frozen() == {"b0": [2.0] * 3, "b1": [0.0] * 2}
    net.scale = None
    assert frozen() == {"b1": [0.0] * 2}
    net.scale = torch.full((3,), 4.0)
    data = b"".join(bytes(part) for part in replica.copy(0))
    net.late.fill_(5.0)
    replica.write(0, memoryview(data))
    assert net.late.tolist() == [0.0] * 2
    assert frozen() == {"b0": [4.0] * 3, "b1": [0.0] * 2}


def test_a_frozen_parameter_that_the_program_changes_is_compared_and_given() -> None:
    """A momentum encoder within the model: it differed on all ranks, and they were equal to the bit."""
    nets = [nn.Sequential(nn.Linear(8, 8), nn.Linear(200, 200).requires_grad_(False)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    mine, theirs = (Replica(net, 4) for net in nets)
    assert (mine.trained, mine.slices, mine.entries) == (4, 8, 72)
    with torch.no_grad():
        nets[1][1].weight[150, 7] += 1.0
    unlike = [which for which in range(mine.slices) if mine.mark(which) != theirs.mark(which)]
    assert len(unlike) == 1
    assert unlike[0] >= mine.trained  # slices that are trained are not sent for it
    mine.write(unlike[0], memoryview(b"".join(theirs.copy(unlike[0]))))
    assert torch.equal(nets[0][1].weight, nets[1][1].weight)
    nets[0][1].requires_grad_(True)  # unfrozen later: what an optimizer keeps for it is part of the state, too
    optimizer = torch.optim.SGD(nets[0][1].parameters(), 0.1, momentum=0.9)
    assert mine.adopt(optimizer)
    nets[0][1](torch.ones(1, 200)).sum().backward()
    optimizer.step()
    assert "momentum_buffer" in str(mine.describe())
    assert mine.size(4) == 2 * theirs.size(4)


def test_large_buffers_are_cut_like_parameters() -> None:
    """All went with one slice: a queue of 33 MB never came within a small part of a step."""
    net = nn.Linear(1000, 1000)
    net.register_buffer("queue", torch.arange(500_000.0).view(500, 1000))
    net.register_buffer("small", torch.ones(7))
    replica = Replica(net)
    sizes = [replica.size(which) for which in range(replica.slices)]
    assert replica.slices == 2 * replica.trained == 64
    assert max(sizes) < 2 * SLICE_LEAST
    assert sum(sizes) == 4 * (1_001_000 + 500_000 + 7)
    assert [which for which in range(64) if replica.has_buffers(which)] == list(range(31, 64))
    data = [memoryview(b"".join(replica.copy(which))) for which in range(64)]
    queue = net.queue.clone()
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.zero_()
    replica.freeze()
    for which, part in enumerate(data):
        replica.write(which, part)
    assert torch.equal(net.queue, queue)
    assert net.small.tolist() == [1.0] * 7


@pytest.mark.parametrize(("rate", "scale"), [(0.02, 1.0), (0.01, 2.0)])
def test_learning_rates_and_the_loss_scale_are_part_of_the_layouts(rate: float, scale: float) -> None:
    """Slices do not carry them: who has other ones takes them with the optimizers' form."""
    _, optimizer, replica = trained(8)
    optimizer.param_groups[0]["lr"] = 0.01
    replica.note_rates(optimizer, 1.0)
    before, layout, told = replica.rates(), replica.layouts(), replica.describe()
    optimizer.param_groups[0]["lr"] = torch.tensor(rate, dtype=torch.float64)
    replica.freeze()  # a rank that holds ends the step before its scheduler, the others after theirs
    assert (replica.rates(), replica.layouts()) == (before, layout)  # as they were in the step
    replica.note_rates(optimizer, scale)
    assert replica.rates() != before
    assert replica.layouts() != layout
    replica.arrange(told)  # of another rank, after that step
    assert (replica.rates(), replica.layouts()) == (before, layout)
