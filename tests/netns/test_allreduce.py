"""All-reduces over XDP between namespaces: bits and accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from lab_team import lab_team
from left_behind import nothing_more
from support import Reference, gradients, patient, whole
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


@pytest.mark.parametrize(("bits", "most"), [(16, 2e-7), ((4, 8), 0.015)])
def test_other_widths_of_a_code_give_the_same_bits_over_both_datapaths(lab: Cluster, bits: Bits, most: float) -> None:
    """Half bytes are taken apart by the kernel, planes of 16 bits put together by the host; nothing is lost."""
    outs: dict[str, list[np.ndarray]] = {"xdp": [], "udp": []}
    for datapath, kept in outs.items():
        with lab_team(lab, patient(**WIDE, bits=bits), datapath=datapath, cookie=7) as job:
            for op in range(2):
                inputs, results = job.averaged(NUMEL // 2 + 13, op)
                whole(results, inputs, most)
                kept.append(results[0][0])
    for ours, theirs in zip(*outs.values(), strict=True):
        np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))
