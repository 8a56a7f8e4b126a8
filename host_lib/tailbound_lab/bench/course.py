"""One rank of an experiment with trainings: all variants in one process, in turns of a few steps."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tailbound.collective.communicator import Communicator
from tailbound.errors import CapabilityError, TransportError
from tailbound.torch import TailboundState
from tailbound_lab.bench import digits
from tailbound_lab.bench.channel import OURS, Channel, order_of, serve
from tailbound_lab.bench.contest import group, totals
from tailbound_lab.bench.gpt import GPT
from tailbound_lab.bench.meter import Meter
from tailbound_lab.bench.softirq import busy_seconds
from tailbound_lab.bench.start import StartLine
from tailbound_lab.bench.train_plan import WARMUP_OURS, WARMUP_THEIRS
from tailbound_lab.bench.trainee import Trainee
from tailbound_lab.bench.variants import wrap
from tailbound_lab.lab.straggler import step_delay

#: Seconds for which ranks wait for each other, as long as the slowest one looks at its accuracy.
_MEET_SECONDS = 170.0
#: Share of the steps before PowerSGD compresses, as torch advises for accuracy.
_POWERSGD_SHARE = 0.1


class Course:
    """All trainees of one seed after the other, stepped through together by all ranks.

    Args:
        job: of ``Experiment``: the fields of a ``Scenario`` that say what is trained, ``options`` of ``register``,
            ``bucket_mib`` and ``data_folder``.
        channel: to who gives orders.
    """

    def __init__(self, job: dict[str, Any], channel: Channel) -> None:
        self._job, self._channel = job, channel
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._line = StartLine(Path(job["folder"], "start"), self.rank, self.ranks, timeout=_MEET_SECONDS)
        self._meter = Meter(kernel=self.rank == 0)
        self._trainees: dict[str, Trainee] = {}
        self._state: TailboundState | None = None
        self._communicator: Communicator | None = None

    def phase(self, *, do: str, **what: Any) -> dict[str, Any]:
        """Do ``begin``, ``run``, ``stats``, ``weights`` or ``finish``."""
        found: dict[str, Any] = getattr(self, do)(**what)
        return found

    def begin(self, seed: int) -> dict[str, Any]:
        """Make the trainees of a seed, and warm them up: connections, buckets, scales, deadlines."""
        job = self._job
        self._seed = seed
        data = digits.restore(Path(job["data_folder"], f"{job['data']}{seed}.npz"))
        self._train = torch.from_numpy(data.train_inputs), torch.from_numpy(data.train_labels)
        self._test = torch.from_numpy(data.test_inputs), torch.from_numpy(data.test_labels)
        self._meter.forget()
        self._trainees = {name: self._trainee(name) for name in job["variants"]}
        ours = self._trainees.get(OURS)
        self._state = None if ours is None else ours.state
        self._communicator = None if self._state is None else self._state.communicator
        self._channel.report("begun", seed=seed)
        self._spent = dict.fromkeys(self._trainees, 0.0)
        steps = self._steps()
        for name, trainee in self._trainees.items():
            count = WARMUP_OURS if name == OURS else WARMUP_THEIRS
            with trainee.frozen():
                self._line.wait()
                self._turn(name, [steps[i % len(steps)] for i in range(count)])
            self._spent[name] = 0.0
        self._before = totals(self._communicator) if self._communicator else {}
        size = next(iter(self._trainees.values())).gradient_bytes()
        return {"gradient_bytes": size} | self.stats()

    def run(self) -> dict[str, Any]:
        """Take turns until all steps are done, or the time is over before a round: rank 0 says so, to all ranks."""
        steps, turn, look = self._steps(), self._job["turn"], self._job["look"]
        names = list(self._trainees)
        for name in names:
            self._report(name, -1, {"steps": [], "wall": 0.0, "busy": 0.0, "losses": []}, look=True)
        for number, first in enumerate(range(0, len(steps), turn)):
            at_end, order = first + turn >= len(steps), order_of(names, number)
            for name in order:
                late = number > 0 and name == order[0] and sum(self._spent.values()) > self._job["seconds"]
                self._line.wait(last=late, meanwhile=partial(self._meter.turn, name))
                if self._line.over:
                    break
                taken = self._turn(name, steps[first : first + turn])
                self._report(name, number, taken, look=at_end or (number + 1) % look == 0)
            if self._line.over:
                break
        self._line.wait(meanwhile=self._meter.turn)
        counted: dict[str, Any] = {"cpu_seconds": time.process_time(), "spent": self._meter.report()}
        if self._communicator is not None:
            if not self._communicator.drain():
                raise TransportError(f"rank {self.rank}: ops are still unfinished after the last step: report it")
            after = totals(self._communicator)
            counted |= {name: after[name] - self._before[name] for name in after}
            counted["datapath"] = self._communicator.datapath
            self._communicator.meet("trained")
        return counted

    def stats(self) -> dict[str, Any]:
        """Return what Tailbound has counted, and datagrams for which its socket had no room."""
        if self._state is None or self._communicator is None:
            return {}
        drops = 0
        if self._communicator.datapath == "udp":
            port = self._communicator.job.datapath.endpoint[1]
            drops = udp_drops(Path("/proc/thread-self/net/udp").read_text(), port)
        return {"stats": self._state.stats(), "socket_drops": drops, "datapath": self._communicator.datapath}

    def weights(self) -> dict[str, Any]:
        """Leave all replicas in the shared folder, a file each."""
        for name, trainee in self._trainees.items():
            np.save(Path(self._job["data_folder"], f"{name}{self.rank}.npy"), trainee.weights())
        return {}

    def finish(self) -> dict[str, Any]:
        """End Tailbound's part in this seed."""
        if self._state is not None and self._communicator is not None:
            self._communicator.meet("counted")
            self._state.close()
        self._trainees, self._state, self._communicator = {}, None, None
        return {}

    def close(self) -> None:
        """End what an error has left open."""
        if self._trainees and self._state is not None:
            self._state.close()

    def _trainee(self, name: str) -> Trainee:
        job = self._job
        start = WARMUP_THEIRS + round(_POWERSGD_SHARE * job["steps"])
        options = {"datapath": job["datapath"], **job["options"]}
        bucket = job.get("bucket_mib")
        return Trainee(
            digits.model(self._seed) if job["model"] == "digits" else GPT(self._seed),
            lambda net, optimizer: wrap(name, net, optimizer, bucket_mib=bucket, powersgd_start=start, options=options),
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
        trainee = self._trainees[name]
        busy, begin = busy_seconds(), time.perf_counter()
        times, losses = [], []
        for chosen in mine:
            with self._meter.op():
                times.append(trainee.step(inputs[chosen], labels[chosen]))
            losses.append(trainee.loss)
        wall = time.perf_counter() - begin
        self._spent[name] += wall
        return {"steps": times, "wall": wall, "busy": busy_seconds() - busy, "losses": losses}

    def _report(self, name: str, number: int, taken: dict[str, Any], *, look: bool) -> None:
        accuracy = self._trainees[name].accuracy(*self._test) if look else None
        self._channel.report("turn", name=name, number=number, accuracy=accuracy, **taken)


def device_of(kind: str, rank: int) -> str:
    """Return what this rank trains on; ranks share devices where there are more of them.

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


def udp_drops(table: str, port: int) -> int:
    """Datagrams that the UDP sockets on local ``port`` had no room for, from the text of ``/proc/net/udp``."""
    total = 0
    for line in table.splitlines()[1:]:
        words = line.split()
        if int(words[1].rpartition(":")[2], 16) == port:
            total += int(words[-1])
    return total


def work(job: dict[str, Any], channel: Channel) -> None:
    """Do all of this rank."""
    with group():
        course = Course(job, channel)
        try:
            channel.report("ready")
            channel.obey(course.phase)
        finally:
            course.close()


if __name__ == "__main__":
    sys.exit(serve(work))
