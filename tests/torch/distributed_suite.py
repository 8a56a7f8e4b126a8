"""PyTorch's own tests of ``torch.distributed``, unmodified, over the backend ``tailbound``.

    BACKEND=gloo WORLD_SIZE=3 python tests/torch/distributed_suite.py
    python tests/torch/distributed_suite.py test_all_reduce test_barrier$    # names, or what they begin with

The tests are those of ``torch.testing._internal.distributed.distributed_test``. What they do in a process of their own
is all theirs; only how such a process starts is ours (forked from this one, which has imported PyTorch and its suite),
and how often processes look whether the others are there.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import types
import unittest

# the suite reads these as it is imported
os.environ.setdefault("BACKEND", "tailbound")
os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("TEMP_DIR", tempfile.gettempdir())
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of OpenMP do not survive a fork

from torch.testing._internal import common_distributed

from tailbound.autoload import register_backend

register_backend()  # where the package is installed, `import torch` has done it
for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
    common_distributed.DistTestCases.backend_feature[feature].add("tailbound")

# not before: what is skipped is decided as it is imported
import torch._dynamo  # noqa: E402
import torch._functorch.aot_autograd  # noqa: E402, F401
from torch.testing._internal.distributed import distributed_test  # noqa: E402
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend  # noqa: E402

# else every process imports them for itself: DDP and optimizers take in the compiler
import tailbound.torch  # noqa: E402, F401


def _sleep(seconds: float) -> None:
    """Whether all processes have begun, or have ended, is looked at a hundred times a second instead of ten times."""
    time.sleep(0.01 if seconds == 0.1 else seconds)


for module in (common_distributed, distributed_test):
    module.time = types.SimpleNamespace(**vars(time) | {"sleep": _sleep})


class TailboundSuite(TestDistBackend, DistributedTest._DistTestBase):
    """All tests of PyTorch's suite; their processes are forked from this one, which calls no torch operation itself."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(multiprocessing.get_context("fork").Process)


if __name__ == "__main__":
    wanted = tuple(sys.argv[1:]) or ("test_",)
    names = [name for name in unittest.defaultTestLoader.getTestCaseNames(TailboundSuite)
             if f"{name}$".startswith(wanted) and "cuda" not in name and "nccl" not in name]  # fmt: skip
    result = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite(map(TailboundSuite, names)))
    sys.exit(not (result.wasSuccessful() and result.testsRun))
