"""A replica's state as bytes: parameters, what the optimizers keep of them, and buffers, cut into slices.

A slice is a range of parameter entries with the optimizer's entries of the same range: an elementwise optimizer then
goes on equally wherever a slice is equal. What an optimizer keeps in other shapes (step counts, lists of matrices) goes
with a parameter's first entry. Frozen parameters, which a program may change by itself (a momentum encoder), and large
buffers have slices of their own, behind those of trained parameters; as a rule these are equal, and no rank sends them.
Small buffers go with the last slice of trained parameters. All ranks cut alike, since the cut depends on the model as
it was in the beginning. Plain values beside a parameter, and settings of groups, are told apart from the slices
(``describe``).
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tailbound.errors import ConfigError, TransportError
from tailbound.torch.compat import buffers_of
from tailbound.torch.kept import Told, into, leaves, of_shape, rebuild, tell
from tailbound.torch.streams import settle_thread
from tailbound.wire.jit import compiled

#: Most slices of trained parameters, and of the rest, and fewest bytes of parameters in one. At 64 slices one is a few
#: per cent of a step to send, whatever the size of the model: a step sends all of them, at a quarter of the bytes.
SLICES_MOST, SLICE_LEAST = 64, 64 << 10
#: Bytes of a digest of a slice.
DIGEST = 16

#: What an optimizer keeps that is each rank's own, and that its next step does not use: of LBFGS.
_OWN = ("prev_loss",)

_M1, _M2 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)
_LEFT, _RIGHT = np.uint64(31), np.uint64(33)


@compiled
def _digest(words: NDArray[np.uint64], lanes: NDArray[np.uint64]) -> None:
    """Four lanes of xxHash64's round (Y. Collet, BSD) over ``words``; every change of one word changes its lane."""
    for i in range(words.shape[0]):
        value = lanes[i & 3] + words[i] * _M2
        lanes[i & 3] = ((value << _LEFT) | (value >> _RIGHT)) * _M1


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: its shard of a ``DTensor`` (FSDP), else all of it."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():
        shard: torch.Tensor = to_local()
    return shard


def flat(tensor: torch.Tensor) -> torch.Tensor | None:
    """The memory of what this rank holds of a tensor as one dimension; None where it has holes or overlaps."""
    data = local(tensor).detach()
    if data.is_contiguous():
        return data.view(-1)
    expected = 1
    for stride, size in sorted(zip(data.stride(), data.shape, strict=True)):
        if size > 1 and stride != expected:
            return None
        expected *= size
    return data.as_strided((data.numel(),), (1,))


def octets(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Memory of a contiguous one-dimensional tensor as u8; copied only where it lies on a device."""
    view: NDArray[np.uint8] = tensor.view(torch.uint8).cpu().numpy()
    return view


def _assign(tensor: torch.Tensor, data: memoryview) -> None:
    """Writes ``data`` into the memory of a contiguous one-dimensional tensor of as many bytes, on any device."""
    value = np.frombuffer(data, np.uint8)
    tensor.view(torch.uint8).copy_(torch.from_numpy(value if value.flags.writeable else value.copy()))


class Replica:
    """State of one rank's model, ``module``, which is not its DDP wrapper; ``least``: fewest slices."""

    def __init__(self, module: torch.nn.Module, least: int = 1) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        #: frozen ones: DDP averages nothing for them, whatever becomes of them later
        self.still = [p for p in module.parameters() if not p.requires_grad]
        self._all = [*self.parameters, *self.still]
        self._places = _persistent(module)
        self._frozen: dict[int, torch.Tensor] = {}
        self._devices = {p.device for p in self._all if p.device.type == "cuda"}
        self._marks: list[torch.cuda.Event] = []
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        #: slices assigned lately, and whether optimizers were arranged anew: whoever hands that on clears it
        self.written: set[int] = set()
        self.arranged = False
        sections = self.parameters, self.still
        self._starts, self._still_starts = (np.cumsum([0] + [local(p).numel() for p in one]) for one in sections)
        size = max(sum(local(p).numel() * p.element_size() for p in one) for one in sections)
        wanted = min(SLICES_MOST, max(1, size // SLICE_LEAST))
        #: learning rates of the groups of each optimizer in its last step, and the loss scale
        self._rates: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[float | None]] = weakref.WeakKeyDictionary()
        #: slices of trained parameters
        self.trained = max(1 << (int(wanted).bit_length() - 1), 1 << (least - 1).bit_length())
        self.freeze()
        more = bool(self.still) or any(map(_large, self._frozen.values()))
        self.slices = self.trained << more  #: number of slices: a power of two, so that step numbers may wrap

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that step the model, in the order in which they were met; one that the program has dropped is gone."""
        return [found for held in self._optimizers if (found := held()) is not None]

    @property
    def entries(self) -> int:
        """Parameters of this rank: what a step averages."""
        return int(self._starts[-1])

    def adopt(self, optimizer: torch.optim.Optimizer) -> bool:
        """Takes an optimizer in if it steps any of the parameters; returns whether it does."""
        if any(optimizer is known for known in self.optimizers):
            return True
        ours = {id(p) for p in self._all}
        if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            return False  # not for good: groups may be added to it
        self._optimizers = [held for held in self._optimizers if held() is not None] + [weakref.ref(optimizer)]
        return True

    def warm_up(self) -> None:
        """Compiles what reads the state, so that no step waits for it."""
        some = np.zeros(17, np.uint8)
        for start in (0, 1):  # slices begin anywhere
            _digest(some[start : start + 16].view(np.uint64), np.zeros(4, np.uint64))

    def freeze(self) -> None:
        """Keeps buffers as they are now: they change while parameters stand still."""
        before = self._frozen
        self._frozen = {
            number: before[number].copy_(view) if _of_one_form(before.get(number), view) else view.clone()
            for number, view in self._buffers().items()
        }
        self._marks = [torch.cuda.current_stream(device).record_event() for device in self._devices]

    def note_rates(self, optimizer: torch.optim.Optimizer, scale: float) -> None:
        """Keeps its learning rates and the loss scale: a rank may end the step before its scheduler, others after."""
        self._rates[optimizer] = [*map(_rate, optimizer.param_groups), scale]

    def _settle(self) -> None:
        """Waits until devices have done what was queued before ``freeze``: other threads read from here on."""
        for device in self._devices:
            settle_thread(device)
        for mark in self._marks:
            mark.synchronize()

    def _buffers(self) -> dict[int, torch.Tensor]:
        """Memory of persistent buffers by number, of those that are there now: one may be None, and have data later."""
        found = {}
        for number, (owner, name) in enumerate(self._places):
            buffer = dict(buffers_of(owner)).get(name)
            view = flat(buffer) if buffer is not None and buffer.numel() else None
            if view is not None:
                found[number] = view
        return found

    def cut(self, which: int) -> Iterator[tuple[torch.nn.Parameter, int, int, int]]:
        """Parameters of a slice: (parameter, low, high, low counted over all of its section)."""
        of_trained = which < self.trained
        parameters, starts = (self.parameters, self._starts) if of_trained else (self.still, self._still_starts)
        low, high = self._range(int(starts[-1]), which)
        at = int(np.searchsorted(starts, low, "right")) - 1
        while at < len(parameters) and starts[at] < high:
            start = int(starts[at])
            lo, hi = max(low - start, 0), min(high, int(starts[at + 1])) - start
            if lo < hi:
                yield parameters[at], lo, hi, start + lo
            at += 1

    def _range(self, total: int, which: int) -> tuple[int, int]:
        """The part of ``total`` entries that is of slice ``which`` in its section."""
        place = which % self.trained
        return total * place // self.trained, total * (place + 1) // self.trained

    def _part(self, buffer: torch.Tensor, which: int) -> torch.Tensor:
        """What of a buffer is in a slice: a range of a large one, all of a small one in the last one of its section."""
        if self.slices > self.trained and _large(buffer):
            low, high = self._range(buffer.numel() if which >= self.trained else 0, which)
            return buffer[low:high]
        return buffer if which == self.trained - 1 else buffer[:0]

    def has_buffers(self, which: int) -> bool:
        """Whether parts of buffers are in a slice."""
        return any(self._part(buffer, which).numel() for buffer in self._frozen.values())

    def views(self, which: int) -> list[NDArray[np.uint8]]:
        """Memory of a slice, piece by piece, copied from devices only; two ranks' pieces match if ``layout`` does."""
        self._settle()
        return [octets(view) for _, view in self._pieces(which)]

    def _pieces(self, which: int) -> Iterator[tuple[str, torch.Tensor]]:
        for p, lo, hi, first in self.cut(which):
            whole = flat(p)
            if whole is None:
                continue
            yield f"{'p' if which < self.trained else 'f'}{first}", whole[lo:hi]
            for number, optimizer in enumerate(self.optimizers):
                kept = optimizer.state.get(p) or {}
                for name, tensor in leaves(dict(kept), ""):
                    view = flat(tensor) if tensor.numel() else None
                    if view is None:
                        continue
                    if _alike(tensor, p):
                        yield f"{number}{name} {first}", view[lo:hi]
                    elif lo == 0:
                        yield f"{number}{name}", view
        for number, buffer in self._frozen.items():
            if (part := self._part(buffer, which)).numel():
                yield f"b{number}", part

    def rates(self) -> bytes:
        """16 bytes that tell whether two ranks had the same learning rates and loss scale in the last step."""
        return digest_of(str([self._rates.get(optimizer) for optimizer in self.optimizers]).encode())

    def layout(self, which: int) -> bytes:
        """8 bytes that tell whether slices of two ranks consist of the same pieces and plain values."""
        told = [f"{name}:{view.numel()}:{view.dtype}" for name, view in self._pieces(which)]
        begun = [p for p, low, _, _ in self.cut(which) if low == 0]
        told += [self._plain(optimizer, p) for p in begun for optimizer in self.optimizers if optimizer.state.get(p)]
        return hashlib.blake2b(";".join(told).encode(), digest_size=8).digest()

    @staticmethod
    def _plain(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> str:
        try:
            return str(_tell(optimizer.state[p], "", p, places=False))
        except ConfigError:
            return "?"

    def digest(self, which: int, *, buffers: bool = True) -> bytes:
        """32 bytes over the contents of a slice, with or without the model's buffers."""
        lanes = np.arange(1, 5, dtype=np.uint64)
        self._settle()
        for view in (octets(view) for name, view in self._pieces(which) if buffers or not name.startswith("b")):
            whole = view.size // 8 * 8
            _digest(view[:whole].view(np.uint64), lanes)
            if whole < view.size:
                rest = np.zeros(8, np.uint8)
                rest[: view.size - whole] = view[whole:]
                _digest(rest.view(np.uint64), lanes)
        return lanes.tobytes()

    def mark(self, which: int, *, buffers: bool = True) -> bytes:
        """16 bytes over layout and contents of a slice, with or without the model's buffers."""
        return digest_of(self.layout(which), self.digest(which, buffers=buffers))

    def layouts(self) -> bytes:
        """16 bytes over ``rates`` and the layouts of all slices."""
        return digest_of(self.rates(), *map(self.layout, range(self.slices)))

    def copy(self, which: int) -> list[memoryview]:
        """A slice, copied."""
        return [view.copy().data for view in self.views(which)]

    def size(self, which: int) -> int:
        """Bytes of a slice."""
        return sum(view.nbytes for _, view in self._pieces(which))

    def write(self, which: int, data: memoryview) -> None:
        """Assigns a slice, unless ``data`` is of another size."""
        if self.size(which) != len(data):
            raise TransportError(
                f"slice {which} has {len(data)} bytes on another rank and {self.size(which)} here: "
                "train the same model with the same optimizer on every rank"
            )
        self.written.add(which)
        at = 0
        for _, view in self._pieces(which):
            _assign(view, data[at : at + view.nbytes])
            at += view.nbytes
        for number, buffer in self._buffers().items():
            kept = self._frozen.get(number)
            if kept is not None and _of_one_form(kept, buffer):  # else a forward pass has made another one of it
                self._part(buffer, which).copy_(self._part(kept, which))

    def describe(self, *, places: bool = True) -> list[Told]:
        """Which tensors the optimizers keep, and their plain values and settings, by optimizer.

        ``places``: say which tensors are on a device, too; ranks need not agree on that. A ``ConfigError`` names what
        cannot be given to another rank.
        """
        return [self._describe(optimizer, places) for optimizer in self.optimizers]

    def _describe(self, optimizer: torch.optim.Optimizer, places: bool) -> Told:
        title = type(optimizer).__name__
        strange = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
        if strange:
            raise ConfigError(
                f"{title}.state[{strange[0]!r}] belongs to no parameter and cannot be given to another rank: keep it "
                "beside a parameter"
            )
        state = {
            number: _tell(optimizer.state[p], f"{title}.state", p, places)
            for number, p in enumerate(self._all)
            if optimizer.state.get(p)
        }
        groups = [
            tell({k: v for k, v in group.items() if k != "params"}, f"{title}.param_groups[{number}]", _detached)
            for number, group in enumerate(optimizer.param_groups)
        ]
        return {"state": state, "groups": groups, "rates": self._rates.get(optimizer)}

    def arrange(self, told: Sequence[Told]) -> None:
        """Makes what the optimizers keep of the shape that is ``told``, plain values and settings included."""
        self.arranged = True
        if len(told) != len(self.optimizers):
            raise TransportError(
                f"another rank steps its parameters by {len(told)} optimizers, this one by {len(self.optimizers)}: "
                "pass optimizer= to register, and delete optimizers that are not in use"
            )
        for optimizer, theirs in zip(self.optimizers, told, strict=True):
            if len(theirs["groups"]) != len(optimizer.param_groups):
                raise TransportError(
                    f"another rank's {type(optimizer).__name__} has {len(theirs['groups'])} param_groups, this one's "
                    f"{len(optimizer.param_groups)}: make the same groups on every rank, at the same step"
                )
        for optimizer, theirs in zip(self.optimizers, told, strict=True):
            self._rates.pop(optimizer, None)
            if theirs["rates"] is not None:
                self._rates[optimizer] = theirs["rates"]
            for group, values in zip(optimizer.param_groups, theirs["groups"], strict=True):
                for name in group.keys() & values.keys():
                    group[name] = rebuild(values[name], group[name], into)
            for number, p in enumerate(self._all):
                kept = theirs["state"].get(number)
                if kept is None:
                    optimizer.state.pop(p, None)
                    continue
                own = optimizer.state[p]
                made = rebuild(kept, dict(own), lambda form, had, p=p: of_shape(form, had, p, local))  # type: ignore[misc]
                own.clear()
                own.update(made)


def digest_of(*parts: bytes) -> bytes:
    """16 bytes over ``parts``."""
    return hashlib.blake2b(b"".join(parts), digest_size=DIGEST).digest()


def _detached(tensor: torch.Tensor, _: str) -> torch.Tensor:
    return tensor.detach()


def _large(buffer: torch.Tensor) -> bool:
    return buffer.numel() * buffer.element_size() > SLICE_LEAST


def _rate(group: dict[str, Any]) -> float | None:
    """The learning rate of a group; None where there is none, or it would have to be fetched from a device."""
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor):
        return float(rate) if rate.device.type == "cpu" and rate.numel() == 1 else None
    return rate if isinstance(rate, int | float) else None


def _persistent(module: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """Where persistent buffers are, shared ones once: wrappers may change their names in a ``state_dict``."""
    seen, places = set[int](), []
    for owner in module.modules():
        for name, buffer in buffers_of(owner):
            if id(buffer) in seen:
                continue
            if buffer is not None:
                seen.add(id(buffer))
            places.append((owner, name))
    return places


def _of_one_form(kept: torch.Tensor | None, view: torch.Tensor) -> bool:
    """Whether ``kept`` takes in ``view`` as it is."""
    return kept is not None and (kept.shape, kept.dtype, kept.device) == (view.shape, view.dtype, view.device)


def _alike(kept: torch.Tensor, p: torch.Tensor) -> bool:
    """Whether the memory of both is laid out alike, so that a range of one goes with that range of the other."""
    ours, theirs = local(kept), local(p)
    return ours.shape == theirs.shape and ours.stride() == theirs.stride()


def _tell(kept: Any, name: str, p: torch.Tensor, places: bool) -> Told:
    """What is kept beside ``p``: all of it but the memory of tensors, of which the form is told."""

    def form(tensor: torch.Tensor, name: str) -> Told:
        if tensor.numel() and flat(tensor) is None:
            raise ConfigError(
                f"{name} has holes or overlaps in memory and cannot be given to another rank: make it contiguous"
            )
        there = places and tensor.device.type != "cpu"  # fused optimizers keep step counts beside the parameters
        kind = str(tensor.dtype).removeprefix("torch.")
        return {"shape": list(local(tensor).shape), "dtype": kind, "like": _alike(tensor, p), "there": there}

    told: Told = tell({key: value for key, value in kept.items() if key not in _OWN}, name, form)
    return told
