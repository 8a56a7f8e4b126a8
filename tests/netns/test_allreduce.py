"""All-reduces over XDP between namespaces: bits, accuracy, and a rank that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab_team import lab_team, served_store
from left_behind import nothing_more
from support import PATIENCE, Reference, exact_mean, gradients, nmse, patient
from tailbound.wire.bits import Bits
from tailbound.wire.schema import op_label
from tailbound_lab.lab.cluster import Cluster
from tailbound_lab.lab.spec import LabSpec

pytestmark = pytest.mark.needs("root", "netns", "bpf", "bcc", "headers")

Make = Callable[..., Cluster]


@pytest.fixture(scope="module")
def lab() -> Iterator[Cluster]:
    """Three workers; tests leave it as they find it."""
    with nothing_more(), Cluster(LabSpec(workers=3)) as made:
        yield made


#: A question after an op may cross its end, and is stale then.
STRAY = {"STALE_RESULT"}
#: 8 groups of 64 rows of a full packet.
NUMEL = 8 * 64 * 1408
WIDE = {"width": 1408, "ring_mib": 8.0}
#: Scales that jump up and down.
FACTORS = (1.0, 10.0, 1.0)


@pytest.mark.parametrize("mtu", [1500, 9000])
def test_the_bits_are_those_of_the_reference_over_both_datapaths(tailbound_lab: Make, mtu: int) -> None:
    """One lab, one cookie, the same inputs: kernel sums, numba sums and numpy give the same bits."""
    ranks, cookie = 3, 0xBEEF
    lab = tailbound_lab(workers=ranks, mtu=mtu)
    wanted: dict[int, list[np.ndarray]] = {}  # by width
    for datapath in ("xdp", "udp"):
        with lab_team(lab, patient(width=0, ring_mib=8.0), datapath=datapath, cookie=cookie) as job:
            assert {member.datapath for member in job.communicators} == {datapath}
            width = job[0].config.width
            assert width == (1408 if mtu == 1500 else 3392 if datapath == "xdp" else 8896)
            numel = (100 if mtu == 1500 else 40) * width + 13
            ops = [[factor * x for x in gradients("U", ranks, numel, seed=op)] for op, factor in enumerate(FACTORS)]
            if width not in wanted:
                expected = Reference(ranks, width, cookie)
                wanted[width] = [expected.allreduce(inputs, op_label(op, 0)) for op, inputs in enumerate(ops)]
            for inputs, mean in zip(ops, wanted[width], strict=True):
                for out, outcome in job.allreduce(inputs):
                    assert outcome.delivered == outcome.expected
                    np.testing.assert_array_equal(out.view(np.uint32), mean.view(np.uint32))
            for member in job.communicators:
                assert set(member.stats()["drops"]) <= STRAY


def test_other_widths_of_a_code_give_the_same_bits_over_both_datapaths(lab: Cluster) -> None:
    """Half bytes are taken apart by the kernel, planes of 16 bits put together by the host; nothing is lost."""
    widths: list[tuple[Bits, float]] = [(16, 2e-7), ((4, 8), 0.015)]
    for bits, most in widths:
        same_bits(lab, bits, most)


def same_bits(lab: Cluster, bits: Bits, most: float) -> None:
    outs: dict[str, list[np.ndarray]] = {"xdp": [], "udp": []}
    for datapath, kept in outs.items():
        with lab_team(lab, patient(**WIDE, bits=bits), datapath=datapath, cookie=7) as job:
            for op in range(2):
                inputs = gradients("U", 3, NUMEL // 2 + 13, seed=op)
                results = job.allreduce(inputs)
                for out, outcome in results:
                    assert outcome.delivered == outcome.expected
                    np.testing.assert_array_equal(out.view(np.uint32), results[0][0].view(np.uint32))
                assert nmse(results[0][0], exact_mean(inputs)) <= most
                kept.append(results[0][0])
    for ours, theirs in zip(*outs.values(), strict=True):
        np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


WORKER = """
import json, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from lab_team import connect
from tailbound.collective.communicator import Communicator
from tailbound.transport.config import Config
import logging, os

class Said(logging.Handler):
    texts = []
    def emit(self, record):
        self.texts.append(record.getMessage())

logging.getLogger("tailbound").addHandler(Said())
rank, ranks, ops = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[3])
config = Config(rank=rank, ranks=ranks, port=int(os.environ["TAILBOUND_PORT"]), ring_mib=8.0,
                deadline_1=200_000_000, deadline_2=200_000_000)
with Communicator(connect(sys.argv[2]), config, datapath="xdp") as job:
    data, out = np.full(200_000, rank, np.float32), np.empty(200_000, np.float32)
    for op in range(ops):
        outcome = job.allreduce(data, out).result()
        assert outcome.error is None, outcome.error
        print("op", op, flush=True)
        if op == 4:
            sys.stdin.readline()  # until the test has killed the one it wants to kill
    stats = job.stats()
    print(json.dumps({"stats": stats, "said": Said.texts, "missing": sorted(outcome.missing)}))
"""


@pytest.mark.usefixtures("warm_start")
def test_a_killed_worker_is_named_and_the_others_finish(lab: Cluster, tmp_path: Path) -> None:
    """SIGKILL between two ops: its program goes with it, the others end every op and say who is missing."""
    ranks, victim, ops = 3, 1, 12
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    tests = str(Path(__file__).resolve().parents[1] / "worlds")
    with served_store(tmp_path / "store.sock") as store:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        workers = [lab.popen(r, [sys.executable, str(script), tests, store, str(ops)], **pipes) for r in range(ranks)]
        for worker in workers:
            for line in worker.stdout:
                if line == "op 4\n":
                    break
        os.killpg(workers[victim].pid, signal.SIGKILL)
        workers[victim].wait(PATIENCE)
        for rank in (0, 2):
            workers[rank].stdin.write("\n")
            workers[rank].stdin.flush()
        for rank in (0, 2):
            out, _ = workers[rank].communicate(timeout=PATIENCE)
            assert workers[rank].returncode == 0
            told = json.loads(out.splitlines()[-1])
            assert told["missing"] == [victim]
            assert told["stats"]["suspects"] == [victim]
            assert any(f"rank {rank}: the process of rank {victim} has ended" in text for text in told["said"])
            assert told["stats"]["counters"]["ops"] == ops
        for pipe in (workers[victim].stdin, workers[victim].stdout):
            pipe.close()
