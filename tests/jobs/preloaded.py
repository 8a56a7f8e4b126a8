"""What each process of the PyTorch tests would load for itself: imported once, by the server that they are forked from.

That is torch's compiler, which the first step of any optimizer imports, the jobs, and the machine code of the codec and
of the collective. No torch operation is called here: threads of OpenMP and of autograd do not survive a fork.
"""

from __future__ import annotations

import contextlib
import gc

import torch._dynamo
import torch._functorch.aot_autograd  # noqa: F401

import backend_jobs  # noqa: F401
import device_jobs  # noqa: F401
import elastic_jobs  # noqa: F401
import fsdp_jobs  # noqa: F401
import hook_jobs  # noqa: F401
import register_jobs  # noqa: F401
import scaler_jobs  # noqa: F401
from tailbound import prepare

with contextlib.suppress(Exception):  # where jobs cannot run, the tests say why
    prepare.compile_all()
gc.freeze()  # what is never looked at by the collector stays shared with the children
