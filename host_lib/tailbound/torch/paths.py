"""How a bucket goes through the engine, by the device that it lies on: the rest of the hook does not ask which."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, ParamSpec

import numpy as np
import torch

from tailbound.collective.coder import HOST, Coder
from tailbound.errors import CapabilityError, ConfigError
from tailbound.torch.device_coder import DeviceCoder, Form, warm_up
from tailbound.torch.streams import Stream, stream_of

P = ParamSpec("P")

#: Kinds of devices whose buckets are averaged, and their types; sums are taken in the rotated domain, in float32.
KINDS = ("cpu", "cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class BucketPath:
    """Of memory of the host: handed on as numpy arrays, and coded by the compiled passes."""

    #: float types that are coded as they are, without a copy in float32
    native: Collection[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16)

    def __init__(self, stream: Stream | None = None) -> None:
        self.stream = stream or Stream()  #: where order is kept

    def values(self, tensor: torch.Tensor) -> Any:
        """The tensor as the path's coder takes it: a view of numpy, which has no bfloat16, but its bits."""
        return tensor.numpy() if tensor.dtype != torch.bfloat16 else tensor.view(torch.int16).numpy().view(np.uint16)

    def coder(self, mark: Any) -> Coder:
        """Who codes a launch whose bucket is ready at ``mark`` (``Stream.mark``)."""
        return HOST

    def within(self, work: Callable[P, None], mark: Any = None) -> Callable[P, None]:
        """``work``, to be called in the transport thread, in the path's stream and behind ``mark`` if there is one."""
        return work


class DevicePath(BucketPath):
    """Of memory of a device, coded there by ``form``."""

    native: Collection[torch.dtype] = DTYPES

    def __init__(self, stream: Stream, form: Form) -> None:
        super().__init__(stream)
        self.form = form
        self.warm: set[tuple[Any, ...]] = set()  #: kinds of ops that have been warmed up

    def values(self, tensor: torch.Tensor) -> Any:
        """The tensor itself; raises a ``ConfigError`` unless it is one-dimensional."""
        if tensor.dim() != 1:
            raise ConfigError(f"a tensor of shape {tuple(tensor.shape)} cannot be averaged: give a one-dimensional one")
        return tensor

    def coder(self, mark: Any) -> Coder:
        """The device's."""
        return DeviceCoder(self, mark)

    def within(self, work: Callable[P, None], mark: Any = None) -> Callable[P, None]:
        """``work`` in the side stream."""

        def inside(*args: P.args, **kwargs: P.kwargs) -> None:
            with self.stream.use(mark):
                work(*args, **kwargs)

        return inside


class Paths:
    """The paths of one state, made as devices turn up.

    ``host_form``: tests without a device let host memory go the way of a device, coded by this form.
    """

    def __init__(self, *, host_form: Form | None = None) -> None:
        self._host_form = host_form
        self._paths: dict[torch.device, BucketPath] = {}
        if host_form or torch.cuda.is_available():
            warm_up()

    def forms(self) -> dict[str, str]:
        """How devices code, by their names; empty where all buckets lie on the host."""
        return {str(device): path.form.name for device, path in self._paths.items() if isinstance(path, DevicePath)}

    def of(self, device: torch.device) -> BucketPath:
        """The path of ``device``, one of ``KINDS``.

        Raises:
            CapabilityError: it is a CUDA device, and there is no Triton.
        """
        found = self._paths.get(device)
        if found is None:
            form = triton_form() if device.type == "cuda" else self._host_form
            found = DevicePath(stream_of(device), form) if form is not None else BucketPath()
            self._paths[device] = found
        return found


def triton_form() -> Form:
    """Triton's kernels.

    Raises:
        CapabilityError: triton cannot be imported.
    """
    try:
        from tailbound.torch.device_codec.fused import TRITON
    except Exception as error:  # a broken installation raises anything
        raise CapabilityError(
            f"buckets on a GPU are coded by kernels of Triton, which cannot be imported ({error}): pip install triton"
        ) from error
    return TRITON
