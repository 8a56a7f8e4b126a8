"""FSDP2 inside a host, Tailbound between hosts: the all-reduce of HSDP in bounded time.

Parameters are sharded over the ranks of a host by ``fully_shard``; every shard has one replica a host. A rank's part of
the gradient is averaged with those of its replicas by ``FSDPModule.set_all_reduce_hook``: after the reduce-scatter, in
place, while the backward pass goes on. Every place in a host is a job of its own, of as many ranks as there are hosts.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tailbound.errors import ConfigError
from tailbound.torch.backend import Passes
from tailbound.torch.compat import backward_pass, call_after_backward
from tailbound.torch.memory import check
from tailbound.torch.node import of_place
from tailbound.torch.replica import local
from tailbound.torch.state import TailboundState, model_digest

try:
    from torch.distributed.fsdp import FSDPModule
except ImportError as error:
    raise ImportError("tailbound.torch.fsdp needs fully_shard: PyTorch 2.7 or newer") from error

_TOGETHER = "with FSDP the ranks of a host gather parameters from each other; leave out tailbound.torch.batches"


@dataclass
class _Launch:
    """A shard of the gradients of module ``number``, and its average."""

    number: int
    shard: torch.Tensor
    averaged: torch.futures.Future[torch.Tensor] | None  #: None: it is there
    alone: bool = True  #: there are no gradients that the shard is added to, and no hooks that see it
    version: int = 0  #: of ``shard``, when the hook returned; torch counts who writes to it

    def finish(self) -> None:
        """Waits for the average, which takes the shard's place."""
        if self.averaged is not None:
            averaged, self.averaged = self.averaged.wait(), None
            if averaged.data_ptr() != self.shard.data_ptr():
                self.shard.copy_(averaged)


class FsdpState(TailboundState):
    """What ``register`` returns: see ``TailboundState`` for its options, ``stats``, ``hold`` and ``synchronize``.

    Args:
        replicas: the group of the ranks that hold the same shards.
        shards: into which a copy of the model is cut.
    """

    _of_ddp = False

    def __init__(self, replicas: dist.ProcessGroup, *, shards: int = 1, **options: Any) -> None:
        super().__init__(replicas, **options)
        self.shards = shards
        self.together = _TOGETHER
        self._passes = Passes()
        #: torch's number of the backward pass that is under way, and the call that torch keeps for its end
        self._pass: int | None = None
        self._end: weakref.ref[Callable[[], None]] | None = None
        #: by module: its parameters, and whether their gradients were, in the last pass, the shard that the hook had
        self._parameters: list[list[torch.nn.Parameter]] = []
        self._kept: list[bool] = []
        self._launched: list[_Launch] = []
        self._one: Any = None  # a sharded parameter, whose mesh is that of the host's shards

    def put_under(self, modules: Sequence[FSDPModule]) -> None:
        """Sets the all-reduce hook of ``modules``, in the same order on all ranks."""
        if self.communicator is None:
            return
        self._parameters = [_own_parameters(module) for module in modules]
        self._kept = [False] * len(modules)
        sharded: list[Any] = [p for own in self._parameters for p in own]
        self._one = max(sharded, key=lambda p: p.device_mesh.size(), default=None)
        for number, module in enumerate(modules):
            try:
                module.set_all_reduce_hook(self._hook(number))
            except ValueError as error:
                raise ConfigError(f"{type(module).__name__}: {error}: give fully_shard one mesh") from error

    def _hook(self, number: int) -> Callable[[torch.Tensor], None]:
        def average_in_place(shard: torch.Tensor) -> None:
            check(number, shard)
            self._look_for_a_new_pass()
            # data: torch counts what we write ourselves apart from what others write to the shard
            averaged, alone = self._average(number, shard.data, self._passes.call(number)), self._is_alone(number)
            launch = _Launch(number, shard, averaged, alone)
            self._launched.append(launch)
            if not (alone and self._kept[number]):
                for one in self._launched:
                    if one.number == number:  # what came before is what this one is added to
                        one.finish()
            launch.version = shard._version

        return average_in_place

    def _look_for_a_new_pass(self) -> None:
        """At the first module of a backward pass: asks torch to tell its end, and ends the pass before.

        Torch forgets to tell the end of a pass that has raised. The averages of such a pass are awaited here, so that
        none is written into gradients of this one.
        """
        number = backward_pass()
        if number == self._pass:
            return
        if self._pass is not None:
            try:
                self._backward_is_over(whole=False)
            except Exception:
                # Torch still keeps its end: that pass goes on around this one (a checkpoint that is reentrant).
                if self._end is not None and self._end() is not None:
                    raise
        end = self._backward_is_over
        call_after_backward(end)
        self._pass, self._end = number, weakref.ref(end)
        self.before_backward()

    def _is_alone(self, number: int) -> bool:
        return all(
            p.grad is None and not getattr(p, "_post_accumulate_grad_hooks", None) for p in self._parameters[number]
        )

    def _backward_is_over(self, whole: bool = True) -> None:
        """Ends the step and waits for all averages; what it raises then is the first error of any.

        ``whole``: the pass went through all its modules, as far as is known.
        """
        self._pass = None
        launched, self._launched = self._launched, []
        errors: list[Exception] = []
        for launch in launched:
            if launch.alone:
                kept = self._kept[launch.number] = self._is_gradient(launch)
                if not kept and launch.averaged is not None:
                    text = f"rank {self.rank}: the gradients of FSDP module {launch.number} are not averaged"
                    why = "in this pass something divided, converted, moved or removed them before their average came"
                    advice = "drop them (zero_grad) and do the pass again, in which the module waits for its average"
                    errors.append(ConfigError(f"{text}: {why}, and did not in the pass before; {advice}"))
        if self._passes.over(whole):  # by an op behind those of all modules
            number, end = len(self._parameters), torch.zeros(1)
            launched.append(_Launch(number, end, self._average(number, end, True)))
        for launch in launched:
            try:
                launch.finish()
            except Exception as error:
                errors.append(error)
        if whole and self.shards > 1:
            self._share_void()
        if errors:
            raise errors[0]

    def _share_void(self) -> None:
        """Shards leave a step out together (clock-38); all are unsound then if one is, since other hosts made it."""
        mesh, resync = self._one.device_mesh, self.resync
        unsound = resync is not None and not resync.sound
        told = torch.tensor([self.steps.void, unsound], dtype=torch.float32, device=mesh.device_type)
        for group in mesh.get_all_groups():
            dist.all_reduce(told, dist.ReduceOp.MAX, group)
        void, unsound = (bool(one) for one in told)
        self.steps.came(void=void)
        if void and unsound and resync is not None:
            resync.unsound()

    def _is_gradient(self, launch: _Launch) -> bool:
        """Whether the module's gradients are the shard, as the hook has left it: neither converted nor divided."""
        memory = launch.shard.untyped_storage().data_ptr()
        found = [local(p.grad) for p in self._parameters[launch.number] if p.grad is not None]
        alike = bool(found) and all(gradient.untyped_storage().data_ptr() == memory for gradient in found)
        return alike and launch.version == launch.shard._version


def register(
    model: torch.nn.Module,
    replicas: DeviceMesh | dist.ProcessGroup,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> FsdpState:
    """Averages the gradients of an FSDP2 model over ``replicas``, makes these equal, and returns the state.

    To be called on all ranks, once the model is sharded and before its first step (``docs/torch/large.md``).

    Args:
        model: the root module, ``fully_shard`` applied to it.
        replicas: mesh of one dimension, or group, of the ranks that hold the same shards; the first one's parameters
            and buffers are copied to the others.
        optimizer: the optimizer that steps it; one that is not named is found at its first step.
        **options: of ``TailboundState``. With several ranks on a host ``xdp`` needs an interface for each of them
            (``interface="eth0,eth1"``); one for all means ``udp``. A switch serves hosts of one rank.

    Raises:
        ConfigError: not an FSDP2 model, parameters that are not materialised or that FSDP averages over the replicas by
            itself, or an invalid option.
        CapabilityError, AttachError, LayoutError, TransportError: before any training step.
    """
    group = replicas
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ConfigError(f"a mesh of {group.ndim} dimensions: pass the one of the replicas, mesh['replicate']")
        group = group.get_group()
    modules = _modules(model, group)
    shards = max((p.device_mesh.size() for p in model.parameters() if hasattr(p, "device_mesh")), default=1)
    place, places = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    options |= of_place(options, place, places, shards, "shards")
    what = f"{model_digest(model)} in {shards} shards"
    entries = sum(local(p).numel() for p in model.parameters() if p.requires_grad)
    state = FsdpState(group, shards=shards, model=what, entries=entries, **options)
    try:
        _make_equal(model, group)
        state.put_under(modules)
        state.attach(model, optimizer)
    except BaseException:
        state.close()
        raise
    return state


def _modules(model: torch.nn.Module, group: dist.ProcessGroup) -> list[FSDPModule]:
    """The FSDP modules of ``model``, once nothing speaks against averaging their shards over ``group``."""
    if not isinstance(model, FSDPModule):
        raise ConfigError(f"register got a {type(model).__name__}: apply fully_shard to it before")
    others = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    for name, p in model.named_parameters():
        if p.device.type == "meta":
            raise ConfigError(f"{name} is on meta: initialise the model before register")
        mesh = getattr(p, "device_mesh", None)
        if mesh is not None and (both := sorted(others & set(mesh.mesh.flatten().tolist()))):
            raise ConfigError(
                f"FSDP keeps {name} on this rank and on {both}, so these are no replicas to be averaged, or would be "
                "averaged twice: give fully_shard the shard dimension only, mesh=mesh['shard'], and register "
                "mesh['replicate']"
            )
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _own_parameters(module: FSDPModule) -> list[torch.nn.Parameter]:
    """Parameters that ``module`` itself spreads over ranks, and no FSDP module within it."""
    assert isinstance(module, torch.nn.Module)
    inner = (m for m in module.modules() if m is not module and isinstance(m, FSDPModule))
    others = {id(p) for m in inner for p in m.parameters()}
    return [p for p in module.parameters() if hasattr(p, "device_mesh") and id(p) not in others]


def _make_equal(model: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """Copies what the first replica holds to the others, as DDP does when it is made."""
    source = dist.get_global_rank(group, 0)
    for tensor in (*model.parameters(), *model.buffers()):
        held = local(tensor).detach()
        whole = held.contiguous()
        dist.broadcast(whole, source, group)
        if whole is not held:
            held.copy_(whole)
