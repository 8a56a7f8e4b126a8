"""Whole all-reduces over udp whose buckets are tensors, coded as on a device, among ranks that use the passes."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from device_cases import slow_stream, workspace
from support import PATIENCE, Reference, Team, gradients, launch, patient, team
from tailbound.collective.coder import HOST
from tailbound.collective.communicator import Communicator, Handling
from tailbound.collective.op import Outcome
from tailbound.wire.schema import op_label

pytest.importorskip("torch", reason="missing capability 'torch': pip install 'tailbound[torch]'")
import torch

from plain_form import PLAIN
from tailbound.torch.device_coder import DeviceCoder, warm_up
from tailbound.torch.paths import DevicePath

Given = list[tuple[NDArray[np.float32], Outcome]]


def allreduce(job: Team, inputs: list[NDArray[np.float32]], ranks: set[int], starts: tuple[int, ...] = ()) -> Given:
    """One all-reduce in which ``ranks`` bring tensors, all others arrays; ``starts``: of the bucket's tensors."""
    warm_up()

    def one(communicator: Communicator) -> tuple[NDArray[np.float32], Outcome]:
        rank = communicator.config.rank
        data, out = inputs[rank], np.full_like(inputs[rank], np.nan)
        brings, coder = (torch.from_numpy, DeviceCoder(workspace(), None)) if rank in ranks else (np.asarray, HOST)
        handling = Handling(coder=coder, starts=starts)
        return out, launch(communicator, brings(data), brings(out), handling=handling).result(PATIENCE)

    return job.each(one)


@pytest.mark.parametrize("tensors", [(), (60 * 256 + 5, 3, 256 * 260 - 5, 69)], ids=["flat", "tensors"])
@pytest.mark.parametrize(
    ("ranks", "keyed"),
    [(set(), False), ({0, 1, 2}, False), ({1}, True)],
    ids=["arrays", "tensors", "one tensor, with a key"],
)
def test_the_bits_are_those_of_the_reference(
    ranks: set[int], keyed: bool, tensors: tuple[int, ...], key_file: Path
) -> None:
    """Cold, warm, and with scales that jump; it cannot be told from the result who coded how. Rule: clock-27."""
    cookie, width, numel = 0xC0FFEE, 256, sum(tensors) or 20 * 256 * 16 + 77
    expected = Reference(3, width, cookie, tensors)
    starts = tuple(np.cumsum((0, *tensors[:-1])).tolist()) if tensors else ()
    with team(3, patient(width=width, key_file=str(key_file) if keyed else ""), cookie=cookie) as job:
        for op, factor in enumerate([1.0, 1.0, 10.0, 0.01, 1.0]):
            inputs = [(factor * x).astype(np.float32) for x in gradients("U", 3, numel, seed=op)]
            results = allreduce(job, inputs, ranks, starts=starts)
            wanted = expected.allreduce(inputs, op_label(op, 0))
            for out, outcome in results:
                assert (outcome.delivered, outcome.error, outcome.missing) == (outcome.expected, None, set())
                np.testing.assert_array_equal(out.view(np.uint32), wanted.view(np.uint32))
        for member in job.communicators:
            assert member.stats()["authenticated"] == ("on" if keyed else "off")
            assert not {"FORGED", "CORRUPT"} & set(member.stats()["drops"])


def test_a_device_that_takes_long_keeps_nobody_from_anything() -> None:
    """The transport thread takes its turns, ops behind are begun meanwhile, and bits are those of any other rank."""
    stream = slow_stream()
    with team(2, patient()) as job:
        allreduce(job, gradients("C", 2, 30_000, seed=0), set())  # so that the first of the next two is warm
        given = [gradients("C", 2, 30_000, seed=seed) for seed in (1, 2)]
        outs = [[np.empty_like(data[0]) for data in given] for _ in range(2)]
        done: list[list[Future[Outcome]]] = [[], []]
        for index, inputs in enumerate(given):
            for rank, x in enumerate(inputs):
                out, handling = outs[rank][index], Handling()
                if rank == 0:
                    x, out = torch.from_numpy(x), torch.from_numpy(out)
                    handling = Handling(coder=DeviceCoder(DevicePath(stream, PLAIN), None))
                done[rank].append(launch(job[rank], x, out, index, last=index == 1, handling=handling))
        transport, turns = job.engine(0), 0
        while not all(one.done() for one in done[0]):
            transport.ask(lambda: None)  # it answers, whatever the device does
            turns += 1
            if turns == 3:
                assert len(stream.events) == 2, "the second op is begun behind the first"
                assert not any(one.done() for one in (*done[0], *done[1]))
            waiting = [event for event in stream.events if not event.done]
            if turns > 3 and waiting:
                waiting[0].done = True
        for index in (0, 1):
            assert all(one[index].result(PATIENCE).missed == 0 for one in done)
            np.testing.assert_array_equal(outs[0][index].view(np.uint32), outs[1][index].view(np.uint32))
    assert not any(event.waited for event in stream.events)


def test_a_transport_that_fails_hands_the_bucket_back() -> None:
    class Broken(DeviceCoder):
        def encode(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("the device is gone")

    with team(2, patient()) as job:
        x, average = torch.randn(1000), torch.zeros(1000)
        done = launch(job[0], x, average, handling=Handling(coder=Broken(workspace(), None)))
        assert "the device is gone" in str(done.result(PATIENCE).error)
        assert torch.equal(average, x)
