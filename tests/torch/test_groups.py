"""A registered model and its process group die in any order, or with the interpreter, and nothing hangs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.needs("torch")

#: A registered model over a Gloo group that torch has forgotten; a thread of that is in a callback of an all-reduce.
_SCRIPT = """
import gc, threading
import torch, torch.distributed as dist, torch.distributed.nn
import tailbound.torch
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.new_group([0])
model = DistributedDataParallel(torch.nn.Linear(4, 1), process_group=group)
state = tailbound.torch.register(model)
state.close()
state.__dict__.clear()  # as the garbage collector may, before the model
dist.destroy_process_group()
gate, begun = threading.Event(), threading.Event()

def callback(future, threading=threading, gate=gate, begun=begun):
    if threading.current_thread() is not threading.main_thread():  # else the all-reduce was over: the next one is not
        begun.set()
        gate.wait()
    return future.value()

apart = type(callback)(callback.__code__, {}, argdefs=callback.__defaults__)  # its frame keeps no variable of here
while not begun.wait(0.1):
    work = group.allreduce([torch.ones(1 << 22)], dist.AllreduceOptions())
    work.get_future().then(apart)
del work, group
"""
_ENDS = {
    "the model dies, and the callback ends later": "threading.Timer(1.0, gate.set).start(); del model; gc.collect()",
    "the interpreter ends, and the callback does not": "",
}


@pytest.mark.parametrize("end", _ENDS)
def test_a_group_whose_last_holder_is_a_model_does_not_hang(end: str) -> None:
    """A DDP reducer frees its group with the GIL held. Gloo's destructor waits for a thread that waits for the GIL."""
    done = subprocess.run(
        [sys.executable, "-c", f"{_SCRIPT}{_ENDS[end]}\nprint('end')"],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
