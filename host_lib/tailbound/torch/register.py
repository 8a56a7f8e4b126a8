"""One call that puts Tailbound under a DDP model."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Literal, Unpack

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tailbound.collective.communicator import MAX_STEP_OPS
from tailbound.errors import ConfigError
from tailbound.settings.table import Options, known, refuse_unknown
from tailbound.torch import elastic
from tailbound.torch.compat import keep_connections
from tailbound.torch.hook import allreduce_hook
from tailbound.torch.kept import Stateful, check
from tailbound.torch.memory import SUPPORTED
from tailbound.torch.node import find, of_place
from tailbound.torch.node_state import NodeState
from tailbound.torch.paths import DTYPES, KINDS
from tailbound.torch.scaler import adopt
from tailbound.torch.state import TailboundState, model_digest
from tailbound.torch.steps import refuse_optimizer

log = logging.getLogger("tailbound")

#: Name of the option that turns buffer broadcasts off: newer PyTorch has split it.
_SYNC_OPTION = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def register(
    ddp_model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    extra_state: Mapping[str, Stateful] | None = None,
    node_group: Literal["auto", "off"] | None = None,
    **options: Unpack[Options],
) -> TailboundState:
    """Registers the hook on ``ddp_model`` and returns its state.

    Args:
        ddp_model: a DistributedDataParallel model, before its first step.
        optimizer: the optimizer that steps it; one that is not named is found at its first step.
        scaler: torch's gradient scaler, if one steps that optimizer: it becomes a ``tailbound.torch.GradScaler`` in its
            place, on all ranks. One that is not named is found at its first step.
        extra_state: by name, the same on all ranks, what else has ``state_dict()`` and ``load_state_dict()``:
            schedulers, averages of parameters, the place in the data. They go with every whole state
            (``docs/torch/failures.md``).
        node_group: ``"auto"``: the ranks that torchrun has started on a host share its work (``docs/torch/large.md``);
            ``"off"``: each stands for itself. Default: the variable ``TAILBOUND_NODE_GROUP``, else ``"off"``.
        **options: of ``TailboundState``.

    Raises:
        ConfigError: an argument that cannot be, or a model that cannot be averaged.
        LayoutError: ranks differ in the model, in what ``optimizer`` keeps of it, in the loss scale or in an option.
        CapabilityError, AttachError, TransportError: before any training step.
    """
    _check_wrapped(ddp_model)
    refuse_unknown(options)
    if optimizer is not None:
        _check_optimizer(optimizer)
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise ConfigError(f"scaler= is of type {type(scaler).__name__}: give a torch.amp.GradScaler")
    _check_model(ddp_model)
    keep_connections(ddp_model)
    group = elastic.world_of(ddp_model.process_group)
    if group is not ddp_model.process_group and ddp_model.find_unused_parameters:
        raise ConfigError(
            "find_unused_parameters=True: in a job whose ranks may come back, DDP drops the average of a parameter "
            "that only other ranks use: give every parameter a gradient in every step (add 0 * parameter.sum() to the "
            "loss) and pass find_unused_parameters=False, or use torch.distributed.init_process_group"
        )
    check(extra_state or {})
    # over a group of one rank no rank waits for another
    barriers = list(_barriers(ddp_model)) if group is ddp_model.process_group else []
    for what, cure in barriers:
        warnings.warn(f"{what}; {cure}", stacklevel=2)
    state = _state(ddp_model, group, node_group, optimizer, scaler, options)
    try:
        _check_buckets(state, ddp_model)
        if barriers and dist.get_world_size(state.everyone) > 1:
            state.together = "{}; leave out tailbound.torch.batches, or {}".format(*barriers[0])
        state.attach(ddp_model, optimizer, extra_state)
        if scaler is not None:
            adopt(state, scaler)
        state.begin(known("timeout", options))
        ddp_model.register_comm_hook(state, allreduce_hook)  # last: it cannot be taken back
    except BaseException:
        state.close()
        raise
    return state


def _barriers(ddp_model: DistributedDataParallel) -> Iterator[tuple[str, str]]:
    """What DDP and the model wait for in every pass, and what to do.

    A rank that skips a step (``batches``) makes one less, and the others wait for it, or pair it with another step's.
    """
    modules = ddp_model.modules()
    if any(isinstance(one, torch.nn.SyncBatchNorm) and dist.get_world_size(one.process_group) > 1 for one in modules):
        what = (
            "this model has SyncBatchNorm, which exchanges statistics with all ranks in every forward and backward "
            "pass, where a slow rank holds all others"
        )
        yield what, "use BatchNorm or GroupNorm instead"
    if ddp_model.broadcast_buffers and any(True for _ in ddp_model.module.buffers()):
        what = (
            "this model has buffers, and DDP broadcasts them before every forward pass, where a slow rank holds all "
            "others"
        )
        cure = (
            f"pass {_SYNC_OPTION}=False to DistributedDataParallel; running statistics are then each rank's own, until "
            "state.synchronize() makes them equal: call it before you evaluate or save"
        )
        yield what, cure
    if ddp_model.find_unused_parameters:
        what = (
            "find_unused_parameters=True: DDP all-reduces a map of used parameters in every step, and a slow rank "
            "holds all others there"
        )
        yield what, "pass find_unused_parameters=False if every parameter gets a gradient"


def _check_wrapped(model: object) -> None:
    """Raises a ``ConfigError`` for what is no DDP model."""
    if not isinstance(model, DistributedDataParallel):
        compiled = isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel)
        raise ConfigError(
            f"give register a torch.nn.parallel.DistributedDataParallel model, not {type(model).__name__}"
            + ": of one that torch.compile has wrapped pass model._orig_mod, and train the compiled one" * compiled
        )


def _check_optimizer(optimizer: object) -> None:
    """Raises a ``ConfigError`` for what is no optimizer, nor a wrapper around one."""
    if not hasattr(optimizer, "step") or not hasattr(optimizer, "param_groups"):
        raise ConfigError(
            f"optimizer= is of type {type(optimizer).__name__}: give one torch.optim.Optimizer (of a scheduler "
            "scheduler.optimizer); others that step the model are found at their first step"
        )


def _check_model(ddp_model: DistributedDataParallel) -> None:
    """Refuses a model whose gradients Tailbound cannot have, or cannot average."""
    hooks = getattr(ddp_model, "_comm_hooks", [])
    if any(isinstance(state, TailboundState) for _, state in hooks):
        raise ConfigError(
            "this model is registered already: use the state that the first register returned; for another one wrap "
            "model.module in a new DistributedDataParallel"
        )
    if getattr(ddp_model, "mixed_precision", None) is not None:
        raise ConfigError(
            "DistributedDataParallel(mixed_precision=...) has a hook of its own, and a model can have one only: leave "
            "mixed_precision out, and use torch.autocast"
        )
    if any(hasattr(p, "_in_backward_optimizers") for p in ddp_model.parameters()):
        raise ConfigError(
            "_apply_optimizer_in_backward has a hook of its own, and a model can have one only: leave it out, and call "
            "optimizer.step()"
        )
    if hooks:
        hook = getattr(hooks[0][0], "__qualname__", "")
        raise ConfigError(
            f"this model has the communication hook {hook} already, and a model can have one only: leave its "
            "register_comm_hook out (with Accelerate the comm_hook of DistributedDataParallelKwargs)"
        )
    if getattr(ddp_model, "_delay_all_reduce_params", []):
        raise ConfigError(
            "delay_all_reduce_named_params: DistributedDataParallel averages these parameters by itself, where a slow "
            "rank holds all others: remove it"
        )
    ignored = set(getattr(ddp_model.module, "_ddp_params_and_buffers_to_ignore", ()))
    trained = sorted(name for name, p in ddp_model.module.named_parameters() if p.requires_grad and name in ignored)
    if trained:
        raise ConfigError(
            f"DistributedDataParallel is told to ignore {len(trained)} trained parameter(s) ({', '.join(trained[:3])}"
            f"{', ...' if len(trained) > 3 else ''}), which are then each rank's own; Tailbound would make them equal "
            "on all ranks: leave them out of _ddp_params_and_buffers_to_ignore, keep them in a module outside of the "
            "one that is wrapped, or freeze them (requires_grad_(False))"
        )
    for name, p in ddp_model.module.named_parameters():
        if p.requires_grad and (p.dtype not in DTYPES or p.device.type not in KINDS):
            raise ConfigError(
                f"parameter {name} is {str(p.dtype).removeprefix('torch.')} on {p.device}: supported are {SUPPORTED}, "
                "on the CPU or on CUDA devices; freeze it (requires_grad_(False)), or keep it in a module outside"
            )


def _check_buckets(state: TailboundState, ddp_model: DistributedDataParallel) -> None:
    """Refuses a model that DDP cuts into more buckets than a step can number."""
    cap = ddp_model.bucket_bytes_cap
    size = sum(p.numel() * p.element_size() for p in ddp_model.parameters() if p.requires_grad)
    if state.communicator is not None and size // cap >= MAX_STEP_OPS:
        raise ConfigError(
            f"DistributedDataParallel makes about {size // cap} buckets of {cap >> 20} MiB of this model, of "
            f"{MAX_STEP_OPS} that a step can have: give it bucket_cap_mb={1 + (2 * size // MAX_STEP_OPS >> 20)} or more"
        )


def _state(
    ddp_model: DistributedDataParallel,
    group: dist.ProcessGroup,
    node_group: str | None,
    optimizer: torch.optim.Optimizer | None,
    scaler: torch.amp.GradScaler | None,
    options: Options,
) -> TailboundState:
    timeout, returns = known("timeout", options), elastic.is_elastic(group)

    def check(place: int, places: int) -> None:
        """Refuses what several ranks of a host cannot have."""
        _device_of(ddp_model)
        of_place(options, place, places, places, "ranks on a host")

    node = find(group, node_group, timeout, check) if not returns else None
    model = model_digest(ddp_model.module)
    if optimizer is not None and dist.get_world_size(group) > 1:
        refuse_optimizer(optimizer)  # such a one may keep another number of states on each rank
    if not returns:  # a rank that returns takes the others' state and scale
        if kept := _kept(ddp_model, optimizer):
            model += f" with an optimizer that has loaded {kept} states"
        if scaler is not None and scaler.is_enabled():
            model += f" with a loss scale of {scaler.get_scale():g}"
    entries = sum(p.numel() for p in ddp_model.parameters() if p.requires_grad)
    if node is None:
        return TailboundState(group, model=model, entries=entries, **options)
    places = node.places
    given = {**options, **of_place(options, node.place, places, places, "ranks on a host"), "timeout": timeout}
    given |= {"model": f"{model} on hosts of {places} ranks", "entries": -(-entries // places)}
    return NodeState(group, node, device=_device_of(ddp_model), **given)


def _kept(ddp_model: DistributedDataParallel, optimizer: object) -> int:
    """Parameters of the model beside which ``optimizer`` keeps something; it may step others of this rank alone."""
    state = getattr(optimizer, "state", None)
    return sum(bool(state.get(p)) for p in ddp_model.parameters()) if isinstance(state, Mapping) else 0


def _device_of(ddp_model: DistributedDataParallel) -> torch.device:
    """Where buckets lie that the ranks of a host can share."""
    devices = sorted({str(p.device) for p in ddp_model.parameters() if p.requires_grad})
    if len(devices) > 1:
        raise ConfigError(
            f'node_group takes models on one device, and this one is on {", ".join(devices)}: give node_group="off"'
        )
    device = torch.device(devices[0])
    if device.type == "cuda":
        if not dist.is_nccl_available():
            raise ConfigError(
                "node_group needs NCCL for buckets on a GPU, and this PyTorch lacks it: install a build that has it, "
                'or give node_group="off"'
            )
        if ddp_model.find_unused_parameters:
            raise ConfigError(
                "find_unused_parameters=True with node_group on a GPU: DDP's collective and those of the host could "
                'deadlock: give every parameter a gradient, or pass node_group="off"'
            )
    return device
