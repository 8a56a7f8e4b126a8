"""One rank of ``tailbound bench train``: all variants of a scenario in one process, in turns of a few steps."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tailbound.errors import CapabilityError, TransportError
from tailbound_lab.bench import digits
from tailbound_lab.bench.channel import Channel, serve
from tailbound_lab.bench.cpu import busy_seconds
from tailbound_lab.bench.meter import Meter
from tailbound_lab.bench.nets import NETS
from tailbound_lab.bench.start import StartLine
from tailbound_lab.bench.tail_worker import order_of
from tailbound_lab.bench.train_plan import WARMUP_OURS, WARMUP_THEIRS
from tailbound_lab.bench.trainee import Trainee
from tailbound_lab.bench.variants import wrap
from tailbound_lab.bench.worker import totals
from tailbound_lab.lab.straggler import step_delay


class Course:
    """All trainees of one seed, stepped through together by all ranks."""

    def __init__(self, job: Mapping[str, Any], seed: int, line: StartLine, meter: Meter, channel: Channel) -> None:
        self._job, self._seed, self._line, self._meter, self._channel = job, seed, line, meter, channel
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        data = digits.restore(Path(job["folder"], f"{job['data']}{seed}.npz"))
        self._train = torch.from_numpy(data.train_inputs), torch.from_numpy(data.train_labels)
        self._test = torch.from_numpy(data.test_inputs), torch.from_numpy(data.test_labels)
        self.trainees = {name: self._trainee(name) for name in job["variants"]}
        self._spent = dict.fromkeys(self.trainees, 0.0)
        self._gone: set[str] = set()

    def _trainee(self, name: str) -> Trainee:
        job = self._job
        start = WARMUP_THEIRS + round(job["powersgd_share"] * job["steps"])
        options = {"datapath": job["datapath"], **job["options"]}
        return Trainee(
            NETS[job["model"]](self._seed),
            lambda net, optimizer: wrap(name, net, optimizer, powersgd_start=start, options=options),
            rate=job["learning_rate"],
            momentum=job["momentum"],
            delay=step_delay(self.rank),
            device=device_of(job["device"], self.rank),
        )

    def _steps(self) -> list[NDArray[np.int64]]:
        """Indices into the inputs of every step, i64[ranks, batch] each; epoch after epoch."""
        found: list[NDArray[np.int64]] = []
        epoch = 0
        while len(found) < self._job["steps"]:
            found += digits.batches(len(self._train[1]), self.ranks, self._job["batch"], epoch, self._seed)
            epoch += 1
        return found[: self._job["steps"]]

    def _turn(self, name: str, steps: list[NDArray[np.int64]]) -> dict[str, Any]:
        """Steps of one trainee in a row, all ranks starting together; what they took."""
        inputs, labels = self._train
        mine = [torch.from_numpy(step[self.rank]) for step in steps]
        trainee = self.trainees[name]
        busy, begin = busy_seconds(), time.perf_counter()
        times, losses = [], []
        for chosen in mine:
            with self._meter.op():
                times.append(trainee.step(inputs[chosen], labels[chosen]))
            losses.append(trainee.loss)
        wall = time.perf_counter() - begin
        self._spent[name] += wall
        return {"steps": times, "wall": wall, "busy": busy_seconds() - busy, "losses": losses}

    def warm_up(self) -> None:
        """Steps without effect: connections, DDP's buckets, scales, deadlines."""
        steps = self._steps()
        for name, trainee in self.trainees.items():
            count = WARMUP_OURS if name == "tailbound" else WARMUP_THEIRS
            with trainee.frozen():
                self._line.wait()
                self._turn(name, [steps[i % len(steps)] for i in range(count)])
            self._spent[name] = 0.0

    def run(self) -> None:
        """Turns until all steps are done; rank 0 sees to it that who is out of time stops on all ranks."""
        steps, turn, look = self._steps(), self._job["turn"], self._job["look"]
        for name, trainee in self.trainees.items():
            self._report(name, -1, {"steps": [], "wall": 0.0, "busy": 0.0, "losses": []}, trainee, look=True)
        names = list(self.trainees)
        for number, first in enumerate(range(0, len(steps), turn)):
            part = steps[first : first + turn]
            at_end = first + turn >= len(steps)
            for name in order_of(names, number):
                if name in self._gone:
                    continue
                late = self._spent[name] > self._job["seconds"]
                self._line.wait(last=late, meanwhile=partial(self._meter.turn, name))
                if self._line.over:
                    self._meter.turn()
                    self._gone.add(name)
                    continue
                taken = self._turn(name, part)
                self._report(name, number, taken, self.trainees[name], look=at_end or (number + 1) % look == 0)
        self._line.wait(meanwhile=self._meter.turn)

    def _report(self, name: str, number: int, taken: dict[str, Any], trainee: Trainee, *, look: bool) -> None:
        accuracy = trainee.accuracy(*self._test) if look else None
        self._channel.report("turn", seed=self._seed, name=name, number=number, accuracy=accuracy, **taken)


def device_of(kind: str, rank: int) -> str:
    """That this rank trains on; ranks share devices where there are more of them.

    Raises:
        CapabilityError: there is none.
    """
    if kind == "cpu":
        return kind
    if not torch.cuda.is_available():
        raise CapabilityError(
            "no CUDA device: give --device cpu, or install a driver and a PyTorch that is built for CUDA"
        )
    index = rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def train(job: Mapping[str, Any], seed: int, line: StartLine, meter: Meter, channel: Channel) -> None:
    """Everything of one seed."""
    meter.forget()
    course = Course(job, seed, line, meter, channel)
    ours = course.trainees.get("tailbound")
    state = None if ours is None else ours.state
    try:
        communicator = None if state is None else state.communicator
        channel.report("begun", seed=seed)
        course.warm_up()
        before = totals(communicator) if communicator else {}
        course.run()
        counted: dict[str, Any] = {}
        if communicator is not None:
            if not communicator.drain():
                raise TransportError(f"rank {course.rank}: ops are still unfinished after the last step: report it")
            after = totals(communicator)
            counted = {name: after[name] - before[name] for name in before}
            communicator.meet("trained")
            counted["datapath"] = communicator.datapath
        size = next(iter(course.trainees.values())).gradient_bytes()
        channel.report("seed", seed=seed, gradient_bytes=size, spent=meter.report(), **counted)
    finally:
        if state is not None:
            state.close()


def work(job: dict[str, Any], channel: Channel) -> None:
    """Everything this rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    line = StartLine(Path(job["folder"], "start"), dist.get_rank(), dist.get_world_size(), timeout=job["patience"])
    meter = Meter(kernel=dist.get_rank() == 0)
    for seed in job["seeds"]:
        train(job, seed, line, meter, channel)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(serve(work))
