"""Makes ``tailbound`` known as a backend of ``torch.distributed``; PyTorch calls it when it is imported.

The entry point of group ``torch.backends``. It costs next to nothing and never raises, since ``import torch`` would
fail with it: what the backend is made of is imported when the first group asks for it.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

#: Name for ``init_process_group``.
BACKEND = "tailbound"
#: What a group of this backend takes, through Gloo. Bounded ops take CPU tensors.
_DEVICES = ["cpu", "cuda"]


def register_backend() -> None:
    """Registers the backend, once; without ``torch.distributed`` there is nothing to do."""
    try:
        import torch.distributed as dist

        if dist.is_available() and BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=list(_DEVICES))
    except Exception:  # a later PyTorch may have changed it
        logging.getLogger("tailbound").debug("torch does not take the backend %r", BACKEND, exc_info=True)


def _create(backend: Any, options: Any) -> Any:
    """A process group of this backend, from ``torch.distributed``'s description of it and the caller's ``pg_options``.

    By name: this module is below ``tailbound.torch``, and stays free of what that imports.
    """
    return importlib.import_module("tailbound.torch.backend").create(backend, options)
