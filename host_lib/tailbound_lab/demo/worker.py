"""One rank of the demo: the same training twice, over Gloo and over Tailbound, in turns of a few steps."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tailbound.errors import TransportError
from tailbound.torch import TailboundState
from tailbound_lab.bench import digits
from tailbound_lab.bench.channel import Channel, serve
from tailbound_lab.bench.start import StartLine
from tailbound_lab.bench.trainee import Trainee
from tailbound_lab.bench.variants import wrap
from tailbound_lab.demo.ledger import udp_drops
from tailbound_lab.lab.straggler import step_delay

#: In the order in which they have their first turn.
NAMES = ("gloo", "tailbound")
#: Steps before those that count: DDP rebuilds its buckets after the first, connections and scales settle.
_WARMUP = 3


#: Owner maps would still be settled while the demo's packets are counted.
#: A multicast packet that a worker's own cable loses would be one loss to the cable and several to the ledgers.
_OPTIONS: dict[str, Any] = {"share_rows": False, "result": "fanout"}


class Pair:
    """Both trainees and the data, stepped through together by all ranks."""

    def __init__(self, job: dict[str, Any], channel: Channel) -> None:
        self._job, self._channel = job, channel
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._line = StartLine(Path(job["line"]), self.rank, self.ranks)
        data = digits.restore(Path(job["data"]))
        self._train = torch.from_numpy(data.train_inputs), torch.from_numpy(data.train_labels)
        self._test = torch.from_numpy(data.test_inputs), torch.from_numpy(data.test_labels)
        self.trainees = {name: self._trainee(name) for name in NAMES}

    def _trainee(self, name: str) -> Trainee:
        job = self._job
        options = {**_OPTIONS, "datapath": job["datapath"]}
        return Trainee(
            digits.model(job["seed"]),
            lambda net, optimizer: wrap(name, net, optimizer, bucket_mib=digits.BUCKET_MIB, options=options),
            rate=job["rate"],
            delay=step_delay(self.rank),
        )

    def _turn(self, name: str, steps: list[NDArray[np.int64]]) -> list[float]:
        """Steps of one trainee in a row, all ranks starting together; their times."""
        images, labels = self._train
        self._line.wait()
        mine = [torch.from_numpy(step[self.rank]) for step in steps]
        return [self.trainees[name].step(images[chosen], labels[chosen]).whole for chosen in mine]

    def _steps(self, epoch: int) -> list[NDArray[np.int64]]:
        per_rank, seed = self._job["batch"], self._job["seed"]
        return list(digits.batches(len(self._train[1]), self.ranks, per_rank, epoch, seed))

    def warm_up(self) -> None:
        """Some steps without effect."""
        for name in NAMES:
            with self.trainees[name].frozen():
                self._turn(name, self._steps(0)[:_WARMUP])

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
    pair = Pair(job, channel)
    state = pair.trainees["tailbound"].state
    assert state is not None
    assert state.communicator is not None
    with state:
        channel.report("ready", datapath=state.communicator.datapath)
        pair.warm_up()
        channel.report("warm", stats=state.stats())
        pair.run()
        for name, trainee in pair.trainees.items():
            np.save(Path(job["folder"], f"{name}{pair.rank}.npy"), trainee.weights())
        if not state.communicator.drain():
            raise TransportError(f"rank {pair.rank}: ops are still unfinished after the last step; see workers.log")
        state.communicator.meet("trained")
        channel.report("trained", cpu_seconds=time.process_time())
        answer(channel, state)
        state.communicator.meet("counted")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(serve(work))
