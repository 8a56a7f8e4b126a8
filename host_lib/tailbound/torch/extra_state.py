"""States beside model and optimizers that go with every whole state, as bytes (clock-21, clock-32).

Each has its own length, so that an error names the one that it is about.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from tailbound.errors import ConfigError, LayoutError

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


def encode(extra_state: Mapping[str, Stateful], scale: object = None) -> bytes:
    """The states of ``extra_state``, and ``scale``.

    Raises:
        ConfigError: one cannot be saved, by name.
    """
    parts = {"": _saved("", lambda: scale)} | {
        name: _saved(name, each.state_dict) for name, each in extra_state.items()
    }
    head = json.dumps({name: len(part) for name, part in parts.items()}).encode()
    return b"".join((_LENGTH.pack(len(head)), head, *parts.values()))


def decode(data: bytes | bytearray) -> tuple[dict[str, Any], Any]:
    """States by name, and ``scale``; tensors in host memory.

    Raises:
        ConfigError: one cannot be loaded, by name.
    """
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


def load(extra_state: Mapping[str, Stateful], states: Mapping[str, Any]) -> None:
    """``extra_state`` takes ``states`` of another rank, by name.

    Raises:
        LayoutError: it has other names.
        ConfigError: one cannot be loaded, by name.
    """
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
    """Refuses states that cannot go to another rank.

    Raises:
        ConfigError: which, and why.
    """
    if "" in extra_state:
        raise ConfigError("also has an entry without a name: name it")
    decode(encode(extra_state))
