"""The process group of a job whose ranks may die and come back one by one (``docs/torch/failures.md``).

Gloo and NCCL connect all ranks once; when one dies their collectives fail on all others, and a new process cannot join.
So a job whose ranks come and go has no connections below ``torch.distributed``: a default group that knows rank and
world size and refuses every collective, and a group of this rank alone, over which DDP runs. What goes between ranks is
Tailbound's.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from tailbound.autoload import BACKEND
from tailbound.errors import ConfigError
from tailbound.torch.compat import default_group

#: Methods of a process group that are collectives; some have a new and an old name, and not all versions have all.
COLLECTIVES = (
    "all_gather_single_coalesced", "all_to_all_single", "allgather", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier",
    "broadcast", "gather", "recv", "reduce", "reduce_scatter", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip
#: Groups of one rank, with the group of all ranks that each belongs to.
_worlds: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


class Elastic:
    """``pg_options`` of the backend ``tailbound``: a group without connections."""


class ElasticProcessGroup(dist.ProcessGroup):
    """Rank and size, and no connections: every collective is refused."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = self._description = ""

    def getBackendName(self) -> str:
        """As ``torch.distributed.get_backend`` says."""
        return BACKEND

    # PyTorch keeps a group's name in its connections.

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """As of any group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """As of any group."""
        return self._description

    def shutdown(self) -> None:
        """There is nothing to end."""

    abort = shutdown


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        "this job has no collectives, because its ranks may come and go: give DistributedDataParallel "
        "process_group=tailbound.torch.elastic.alone(), log and evaluate on each rank, and write checkpoints on one "
        "rank after state.synchronize(). With dist.init_process_group collectives work, and no rank can come back"
    )


for _name in COLLECTIVES:
    if hasattr(dist.ProcessGroup, _name):
        setattr(ElasticProcessGroup, _name, _refuse)


def init_process_group(timeout: float = 180.0) -> None:
    """Makes the default group of a job whose ranks may come back, and the group of this rank alone.

    By ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``. The store there is the rendezvous, and has to
    outlive the ranks: that of ``torchrun``. Without torchrun rank 0 has it, and all ranks but that one may come back.
    ``timeout``: seconds to wait for the store. A variable that is not set is a ``ConfigError``.
    """
    try:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT do not identify this rank ({error!r}): start it by "
            "torchrun, or set them"
        ) from error
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    wait = timedelta(seconds=timeout)
    store = TCPStore(host, port, ranks, hosts, timeout=wait, wait_for_workers=False)
    # torch's own prefix is that of an attempt; all lives of a rank have to find the same keys
    dist.init_process_group(
        BACKEND, store=PrefixStore("tailbound", store), rank=rank, world_size=ranks, pg_options=Elastic()
    )
    own = dist.new_group([rank], timeout=wait, backend="gloo", use_local_synchronization=True)
    _worlds.clear()
    _worlds[own] = default_group()


def alone() -> dist.ProcessGroup:
    """The group of this rank alone, for ``process_group=`` of the DDP model; a ``ConfigError`` if there is none."""
    if not _worlds:
        raise ConfigError("there is no group of this rank alone: call tailbound.torch.elastic.init_process_group first")
    return next(iter(_worlds))


def world_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """All ranks whose gradients a model over ``group`` is averaged with: ``group`` itself, as a rule."""
    return _worlds.get(group, group)


def is_elastic(group: dist.ProcessGroup) -> bool:
    """Whether ranks of ``group`` may come back."""
    return isinstance(group, ElasticProcessGroup)
