"""One rank of the demo: the same training twice, over Gloo and over Tailbound, in turns of a few steps."""

from __future__ import annotations

import copy
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tailbound.bench.channel import Channel, serve
from tailbound.bench.start import StartLine
from tailbound.demo import digits
from tailbound.demo.ledger import udp_drops
from tailbound.errors import TransportError
from tailbound.lab.straggler import step_delay
from tailbound.torch import TailboundState, register

#: In the order in which they have their first turn.
NAMES = ("gloo", "tailbound")
#: Steps before those that count: DDP rebuilds its buckets after the first, connections and scales settle.
_WARMUP = 3


#: The demo is shorter than what deadlines are learned from: the first twenty ops of a size have halves of 2 s, and one
#: lost mark among them would be its longest step. Owner maps would still be settled while its packets are counted.
#: A multicast packet that a worker's own cable loses would be one loss to the cable and several to the books.
_OPTIONS: dict[str, Any] = {"deadline_ms": (100.0, 100.0), "share_rows": False, "result": "fanout"}


class Trainee:
    """One replica of one of the two models, with its own clock."""

    def __init__(self, name: str, seed: int, rate: float, delay: float, state_options: dict[str, Any]) -> None:
        self.name, self._delay = name, delay
        self.net = digits.model(seed)
        # the same seed makes the same weights everywhere: there is nothing to broadcast over lossy links
        self._ddp = DistributedDataParallel(self.net, bucket_cap_mb=digits.BUCKET_MIB, init_sync=False)
        self._optimizer = torch.optim.SGD(self.net.parameters(), lr=rate, momentum=0.9, fused=True)
        self.state: TailboundState | None = None
        if name == "tailbound":
            self.state = register(self._ddp, optimizer=self._optimizer, **_OPTIONS, **state_options)
        self._start = copy.deepcopy(self.net.state_dict()), copy.deepcopy(self._optimizer.state_dict())
        self._loss = nn.CrossEntropyLoss()

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """One training step; its seconds."""
        begin = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss(self._ddp(images), labels)
        if self._delay:
            time.sleep(self._delay)
        loss.backward()
        self._optimizer.step()
        return time.perf_counter() - begin

    def rewind(self) -> None:
        """Back to the weights and the optimizer of the beginning."""
        self.net.load_state_dict(self._start[0])
        self._optimizer.load_state_dict(self._start[1])

    @torch.no_grad()
    def accuracy(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """Fraction of right answers of this replica."""
        return float((self.net(images).argmax(1) == labels).float().mean())

    def weights(self) -> NDArray[np.float32]:
        """All parameters, f32[n]."""
        return np.concatenate([p.detach().numpy().ravel() for p in self.net.parameters()])


class Course:
    """Both trainees and the data, stepped through together by all ranks."""

    def __init__(self, job: dict[str, Any], channel: Channel) -> None:
        self._job, self._channel = job, channel
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._line = StartLine(Path(job["line"]), self.rank, self.ranks)
        data = digits.restore(Path(job["data"]))
        self._train = torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels)
        self._test = torch.from_numpy(data.test_images), torch.from_numpy(data.test_labels)
        delay = step_delay(self.rank)
        options = {"datapath": job["datapath"]}
        self.trainees = {
            name: Trainee(name, job["seed"], job["rate"], delay, options if name == "tailbound" else {})
            for name in NAMES
        }

    def _turn(self, name: str, steps: list[NDArray[np.int64]]) -> list[float]:
        """Steps of one trainee in a row, all ranks starting together; their times."""
        images, labels = self._train
        self._line.wait()
        mine = [torch.from_numpy(step[self.rank]) for step in steps]
        return [self.trainees[name].step(images[chosen], labels[chosen]) for chosen in mine]

    def _steps(self, epoch: int) -> list[NDArray[np.int64]]:
        per_rank, seed = self._job["batch"], self._job["seed"]
        return list(digits.batches(len(self._train[1]), self.ranks, per_rank, epoch, seed))

    def warm_up(self) -> None:
        """Some steps that are taken back."""
        for name in NAMES:
            self._turn(name, self._steps(0)[:_WARMUP])
            self.trainees[name].rewind()

    def _look(self, name: str, times: list[float]) -> None:
        """Reports what the last steps took and how good this replica is now."""
        accuracy = self.trainees[name].accuracy(*self._test)
        self._channel.report("look", name=name, times=times, accuracy=accuracy)

    def run(self) -> None:
        """Turns of ``turn`` steps until all epochs are done or the time is over; rank 0 looks at the clock."""
        end = time.monotonic() + self._job["seconds"]
        for name in NAMES:
            self._look(name, [])
        turn, done = self._job["turn"], 0
        for epoch in range(self._job["epochs"]):
            steps = self._steps(epoch)
            for first in range(0, len(steps), turn):
                part = steps[first : first + turn]
                for name in NAMES if done % 2 == 0 else reversed(NAMES):
                    for start in range(0, len(part), self._job["look"]):
                        times = self._turn(name, part[start : start + self._job["look"]])
                        self._look(name, times)
                done += 1
                if not self._all_go_on(time.monotonic() < end):
                    return

    def _all_go_on(self, go_on: bool) -> bool:
        """What rank 0 says, outside the time that counts."""
        word = torch.tensor([int(go_on)])
        dist.broadcast(word, 0)
        return bool(word.item())


def answer(channel: Channel, state: TailboundState) -> None:
    """Gives counters whenever they are asked for, until told to go."""
    communicator = state.communicator
    assert communicator is not None
    port = communicator.job.datapath.endpoint[1]
    while channel.order() == "stats":
        drops = 0
        if communicator.datapath == "udp":
            drops = udp_drops(Path("/proc/thread-self/net/udp").read_text(), port)
        channel.report("stats", stats=state.stats(), socket_drops=drops)


def work(job: dict[str, Any], channel: Channel) -> None:
    """Everything this rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    course = Course(job, channel)
    state = course.trainees["tailbound"].state
    assert state is not None
    assert state.communicator is not None
    with state:
        channel.report("ready", datapath=state.communicator.datapath)
        course.warm_up()
        channel.report("warm", stats=state.stats())
        course.run()
        for name, trainee in course.trainees.items():
            np.save(Path(job["folder"], f"{name}{course.rank}.npy"), trainee.weights())
        if not state.communicator.drain():
            raise TransportError(f"rank {course.rank}: ops are still unfinished after the last step; see workers.log")
        state.communicator.meet("trained")
        channel.report("trained", cpu_seconds=time.process_time())
        answer(channel, state)
        state.communicator.meet("counted")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(serve(work))
