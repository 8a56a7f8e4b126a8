"""Ranks of one process without a transport: states of the hook whose communicator is played."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Averages by step and bucket.
Told = dict[tuple[int, int], Any]


def without_job(rank: int = 0, ranks: int = 2, communicator: Any = None, **fields: Any) -> Any:
    """A state that opens no sockets."""
    from tailbound.torch.state import TailboundState

    made: Any = TailboundState.__new__(TailboundState)
    made._set_up(rank, ranks)
    made.communicator = communicator
    for name, value in fields.items():
        setattr(made, name, value)
    return made


class Kept:
    """A scheduler, say."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


class Job:
    """Stands in for the communicator: hands out the averages in ``told``, or keeps what it is given there."""

    elastic, part, config = False, None, SimpleNamespace(rank=0, ranks=2)

    def __init__(self, told: Told, *, keeps: bool) -> None:
        from tailbound.transport.reliable import Reliable

        self.told, self.keeps = told, keeps
        self.step, self.newest, self.lost = 0, 0, False
        self.held = list[bool]()  # whether the others are told to wait
        self.void = dict[int, str]()  # steps whose averages are zeros, and why
        self.reliable = Reliable("127.0.0.1")
        self.job = SimpleNamespace(
            peers=[1], steps=SimpleNamespace(own=0),
            membership=SimpleNamespace(alive=lambda step: [1], quorum=bool, gone=set()),
            sequence=SimpleNamespace(map_at=lambda step: SimpleNamespace(owners=[1])), counters=Counter(),
        )  # fmt: skip

    @property
    def behind(self) -> int:
        return max(0, self.newest - self.step)

    def rings(self, tensors: tuple[int, ...]) -> tuple[int, int, int]:
        return 1, 2, 0

    def hold(self, on: bool) -> None:
        self.held.append(on)

    def launch(self, bucket: int, data: Any, out: Any, *, last: bool, done: Callable[..., None], **_: Any) -> None:
        from tailbound.collective.op import Outcome
        from tailbound.wire.schema import op_label

        if self.keeps:
            self.told[self.step, bucket] = data.copy()
        else:
            out[:] = self.told[self.step, bucket]
        label = op_label(self.step, bucket)
        why = {name: True for at, name in self.void.items() if at == self.step}
        if why:
            out[:] = 0
        self.step += last
        done(Outcome(label=label, expected=1, **why))


class Rank:
    """A rank that trains a model of its own. Its averages are its own gradients, or those in ``told``."""

    def __init__(self, told: Told, *, keeps: bool, module: torch.nn.Module | None = None, **options: Any) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        from tailbound.torch.hook import allreduce_hook

        torch.manual_seed(0)
        usual = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 2))
        self.net = DistributedDataParallel(module or usual, **options)
        self.job = Job(told, keeps=keeps)
        self.state = without_job(communicator=self.job, everyone=None)  # for sparse buckets: the default group
        self.state.attach(self.net)
        self.net.register_comm_hook(self.state, allreduce_hook)

    def loss(self, data: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(data).square().sum()
        return found

    def weights(self) -> list[float]:
        return [float(x) for p in self.net.parameters() for x in p.detach().flatten()]

    def close(self) -> None:
        self.state._let_go()
        self.job.reliable.close()

    def train(
        self,
        iterate: Callable[[int], None],
        steps: int,
        passes: int,
        away: dict[int, int] | None = None,
        **options: Any,
    ) -> list[int]:
        """Returns the computed iterations; this rank was away for ``away[i]`` passes in the iteration i."""
        from tailbound.torch import batches

        def source() -> Iterator[int]:
            for i in range(steps):
                self.job.newest = max(self.job.newest, i * passes + (away or {}).get(i, 0))
                yield i

        computed = []
        for i in batches(source(), self.state, **options):
            iterate(i)
            computed.append(i)
        return computed


def data(i: int) -> torch.Tensor:
    import torch

    return torch.randn(5, 6, generator=torch.Generator().manual_seed(i))


def adam(one: Rank) -> torch.optim.Optimizer:
    import torch

    return torch.optim.Adam(one.net.parameters(), 0.05)


def backward(one: Rank, optimizer: torch.optim.Optimizer, i: int) -> torch.Tensor:
    """A pass with gradients of its own."""
    optimizer.zero_grad()
    loss = one.loss(data(i))
    loss.backward()
    return loss


# Iterations of loops.


def plain(one: Rank) -> Callable[[int], None]:
    optimizer = adam(one)

    def iterate(i: int) -> None:
        backward(one, optimizer, i)
        optimizer.step()

    return iterate


def sam(one: Rank) -> Callable[[int], None]:
    """Two passes, the first at weights that are moved back before the step."""
    import torch

    optimizer = adam(one)

    def iterate(i: int) -> None:
        backward(one, optimizer, i)
        before = [p.detach().clone() for p in one.net.parameters()]
        with torch.no_grad():
            for p in one.net.parameters():
                p.add_(torch.sign(p.grad), alpha=0.01)
        backward(one, optimizer, i)
        with torch.no_grad():
            for p, was in zip(one.net.parameters(), before, strict=True):
                p.copy_(was)
        optimizer.step()

    return iterate


def accumulating(one: Rank) -> Callable[[int], None]:
    """Three passes that add up in ``.grad``, as the losses of a discriminator."""
    optimizer = adam(one)

    def iterate(i: int) -> None:
        optimizer.zero_grad()
        for part in range(3):
            one.loss(data(3 * i + part)).backward()
        optimizer.step()

    return iterate


def alternating(one: Rank) -> Callable[[int], None]:
    """Two passes with a step each, of an optimizer of its own."""
    optimizers = adam(one), adam(one)

    def iterate(i: int) -> None:
        for optimizer in optimizers:
            backward(one, optimizer, i)
            optimizer.step()

    return iterate


def differing(one: Rank) -> Callable[[int], None]:
    """Three passes now and then."""
    one_pass, three = plain(one), accumulating(one)
    return lambda i: three(i) if i % 3 == 0 else one_pass(i)


def by_closure_once(one: Rank) -> Callable[[int], None]:
    """LBFGS, which makes its pass itself, one in a step."""
    import torch

    optimizer = torch.optim.LBFGS(one.net.parameters(), 0.01, max_iter=1)
    return lambda i: optimizer.step(lambda: backward(one, optimizer, i))
