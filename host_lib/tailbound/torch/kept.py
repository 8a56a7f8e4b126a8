"""What an optimizer keeps, told in JSON and rebuilt from it: tensors and plain values, in lists, tuples and dicts.

Of a tensor beside a parameter the form is told, and its memory goes with a slice; one among the settings of a group (a
learning rate that a captured graph reads) is small and told with its values. Every value is told as an object of one
entry, whose name is its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from tailbound.errors import ConfigError

Told: TypeAlias = "dict[str, Any]"

#: Entries of a tensor among the settings of a group, at most.
_SETTING_MOST = 1024


def plain(value: Any) -> bool:
    """Whether JSON tells ``value`` and gives it back as it was."""
    return value is None or isinstance(value, bool | int | float | str)


def leaves(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors in ``value`` with the way to them, in an order that all ranks share."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from leaves(value[key], f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for place, part in enumerate(value):
            yield from leaves(part, f"{name}.{place}")


def tell(value: Any, name: str, tensor: Callable[[torch.Tensor, str], Told]) -> Told:
    """``value`` in terms of JSON.

    Args:
        name: of what it is, for errors.
        tensor: tells of a tensor with such a name.

    Raises:
        ConfigError: a kind of value that cannot be given to another rank, by name.
    """
    if plain(value):
        return {"plain": value}
    if isinstance(value, torch.Tensor):
        return {"tensor": tensor(value, name)}
    if type(value) in (list, tuple):
        return {type(value).__name__: [tell(part, f"{name}[{k}]", tensor) for k, part in enumerate(value)]}
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, tell(value[key], f"{name}[{key!r}]", tensor)] for key in sorted(value, key=str)]}
    raise ConfigError(
        f"{name} is a {type(value).__name__}, which cannot be given to another rank: keep tensors and plain values, in "
        "lists, tuples and dicts"
    )


def rebuild(told: Told, own: Any, tensor: Callable[[Told, Any], torch.Tensor]) -> Any:
    """What ``tell`` told; tensors of ``own``, what is here now, stay where ``tensor(told, own)`` lets them."""
    ((kind, what),) = told.items()
    if kind == "plain":
        return what
    if kind == "tensor":
        return tensor(what, own)
    if kind == "dict":
        had = own if isinstance(own, dict) else {}
        return {key: rebuild(part, had.get(key), tensor) for key, part in what}
    parts = own if isinstance(own, list | tuple) else ()
    made = [rebuild(part, parts[k] if k < len(parts) else None, tensor) for k, part in enumerate(what)]
    return tuple(made) if kind == "tuple" else made


def tell_setting(tensor: torch.Tensor, name: str) -> Told:
    """A small tensor with its values.

    Raises:
        ConfigError: it is a large one.
    """
    if tensor.numel() > _SETTING_MOST:
        raise ConfigError(
            f"{name} is a tensor of {tensor.numel()} entries among settings: keep at most {_SETTING_MOST} there"
        )
    kind = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": kind, "shape": list(tensor.shape), "values": tensor.detach().cpu().flatten().tolist()}


def rebuild_setting(told: Told, own: Any) -> torch.Tensor:
    """The tensor that ``tell_setting`` told: written into ``own``, which a captured graph may read, where that fits."""
    made = torch.tensor(told["values"], dtype=getattr(torch, told["dtype"])).reshape(told["shape"])
    if not isinstance(own, torch.Tensor) or own.shape != made.shape or own.dtype != made.dtype:
        return made
    with torch.no_grad():
        return own.copy_(made)


def of_shape(told: Told, own: Any, p: torch.Tensor, held: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A tensor of the form told: ``own`` if it has it, else a new one of zeros.

    Args:
        told: ``shape``, ``dtype``, ``like`` (laid out as ``p``), ``there`` (on a device, as ``p``).
        own: what is here now.
        p: the parameter that it belongs to.
        held: gives what this rank holds of a tensor.
    """
    shape, dtype = told["shape"], getattr(torch, told["dtype"])
    if isinstance(own, torch.Tensor) and list(held(own).shape) == shape and own.dtype == dtype:
        return own
    if told["like"] and list(held(p).shape) == shape:
        return torch.zeros_like(p, dtype=dtype).detach()
    return torch.zeros(shape, dtype=dtype, device=p.device if told["there"] else None)
