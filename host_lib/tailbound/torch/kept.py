"""What an optimizer keeps and ``extra_state``: how one rank tells them, and another takes them (clock-21, clock-32).

What an optimizer keeps is told and rebuilt from that: tensors and plain values, in lists, tuples and dicts. A tensor is
told as a dict with the key None. Beside a parameter that has the tensor's form, and a slice its memory; among the
settings of a group (a learning rate that a captured graph reads) it has the tensor. All of that goes as bytes, beside
those of each state of ``extra_state``: an error names the one that it is about.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import torch

from tailbound.errors import ConfigError, LayoutError

Told: TypeAlias = "dict[str, Any]"


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


def tell(value: Any, name: str, tensor: Callable[[torch.Tensor, str], Any]) -> Any:
    """``value``, which is called ``name`` in errors, in plain types; ``tensor`` tells of a tensor with such a name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        return {None: tensor(value, name)}
    if type(value) in (list, tuple):
        return type(value)(tell(part, f"{name}[{k}]", tensor) for k, part in enumerate(value))
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return {key: tell(value[key], f"{name}[{key!r}]", tensor) for key in sorted(value, key=str)}
    raise ConfigError(
        f"{name} is a {type(value).__name__}, which cannot be given to another rank: keep tensors and plain values, in "
        "lists, tuples and dicts"
    )


def rebuild(told: Any, own: Any, tensor: Callable[[Any, Any], torch.Tensor]) -> Any:
    """What ``tell`` told; tensors of ``own``, what is here now, stay where ``tensor(told, own)`` lets them."""
    if isinstance(told, dict):
        if None in told:
            return tensor(told[None], own)
        had = own if isinstance(own, dict) else {}
        return {key: rebuild(part, had.get(key), tensor) for key, part in told.items()}
    if isinstance(told, list | tuple):
        parts = dict(enumerate(own)) if isinstance(own, list | tuple) else {}
        return type(told)(rebuild(part, parts.get(k), tensor) for k, part in enumerate(told))
    return told


def into(told: torch.Tensor, own: Any) -> torch.Tensor:
    """``told``, written into ``own``, which a captured graph may read, where that fits."""
    if not isinstance(own, torch.Tensor) or own.shape != told.shape or own.dtype != told.dtype:
        return told
    with torch.no_grad():
        return own.copy_(told)


def of_shape(told: Told, own: Any, p: torch.Tensor, held: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A tensor of the form told (``replica._tell``): ``own``, what is here now, if it has it, else a new one of zeros.

    ``held``: gives what this rank holds of a tensor.
    """
    shape, dtype = told["shape"], getattr(torch, told["dtype"])
    if isinstance(own, torch.Tensor) and list(held(own).shape) == shape and own.dtype == dtype:
        return own
    if told["like"] and list(held(p).shape) == shape:
        return torch.zeros_like(p, dtype=dtype).detach()
    return torch.zeros(shape, dtype=dtype, device=p.device if told["there"] else None)


_LENGTH = struct.Struct("!I")


class Stateful(Protocol):
    """An object whose state is taken over: a scheduler, say."""

    def state_dict(self) -> dict[str, Any]:
        """Its state, in types that ``torch.load(weights_only=True)`` takes."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Takes such a state."""


def _saved(name: str, state: Callable[[], object]) -> bytes:
    out = io.BytesIO()
    try:
        torch.save(state(), out)
    except Exception as error:  # of the caller's own state_dict, too
        raise ConfigError(
            f"the state of extra_state[{name!r}] cannot be given to another rank ({type(error).__name__}: {error}): "
            "make its state_dict() return plain types and tensors"
        ) from error
    return out.getvalue()


def encode(extra_state: Mapping[str, Stateful], rest: object = None) -> bytes:
    """The states of ``extra_state``, and ``rest``."""
    parts = {"": _saved("", lambda: rest)} | {name: _saved(name, each.state_dict) for name, each in extra_state.items()}
    head = json.dumps({name: len(part) for name, part in parts.items()}).encode()
    return b"".join((_LENGTH.pack(len(head)), head, *parts.values()))


def decode(data: bytes | memoryview) -> tuple[dict[str, Any], Any]:
    """States by name, and ``rest``; tensors in host memory."""
    view = memoryview(data)
    at = _LENGTH.size + _LENGTH.unpack_from(view)[0]
    found: dict[str, Any] = {}
    for name, size in json.loads(bytes(view[_LENGTH.size : at])).items():
        try:
            found[name] = torch.load(io.BytesIO(view[at : at + size]), map_location="cpu", weights_only=True)
        except Exception as error:
            raise ConfigError(
                f"the state of extra_state[{name!r}] cannot be loaded ({type(error).__name__}: {error}): make "
                "state_dict() return types that torch.load(weights_only=True) takes"
            ) from error
        at += size
    return found, found.pop("")


def canonical(value: Any) -> str:
    """Words for a decoded state that are the same on all ranks which hold the same, whatever objects they hold."""
    if isinstance(value, torch.Tensor):
        return hashlib.blake2b(_saved("", value.detach().clone)).hexdigest()
    if isinstance(value, dict):
        return f"{{{sorted((repr(key), canonical(part)) for key, part in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}{[canonical(part) for part in value]}"
    return str(sorted(map(repr, value))) if isinstance(value, set) else repr(value)


def load(extra_state: Mapping[str, Stateful], states: Mapping[str, Any]) -> None:
    """``extra_state`` takes ``states`` of another rank, by name; a ``LayoutError`` if it has other names."""
    if lacking := extra_state.keys() ^ states.keys():
        raise LayoutError(
            f"register was given extra_state={sorted(lacking)} on some ranks only: give it on all ranks alike"
        )
    for name, state in states.items():
        try:
            extra_state[name].load_state_dict(state)
        except Exception as error:
            raise ConfigError(
                f"extra_state[{name!r}] does not take its state of another rank ({type(error).__name__}: {error}): "
                "give register the same extra_state= on all ranks"
            ) from error


def check(extra_state: Mapping[str, Stateful]) -> None:
    """Refuses states that cannot go to another rank, by a ``ConfigError``."""
    what = "a dictionary, {'scheduler': ...}, of what has state_dict() and load_state_dict()"
    if not isinstance(extra_state, Mapping):
        raise ConfigError(f"extra_state= is of type {type(extra_state).__name__}: give {what}")
    for name, each in extra_state.items():
        if not (name and isinstance(name, str) and hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise ConfigError(f"extra_state[{name!r}] is of type {type(each).__name__}: give {what}")
    decode(encode(extra_state))
