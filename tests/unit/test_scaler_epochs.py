"""Which epoch of the loss scale a rank goes by, and whom it tells of its own, with the other ranks played."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

from tailbound.errors import TransportError
from tailbound.torch.loss_scale import Epoch
from tailbound.torch.scaler import GradScaler
from tailbound.transport.steps import STEP_MASK

PATIENCE = 30


class Peers:
    """Of rank 0: those that are silent do not answer, and those that are dead are known not to."""

    def __init__(self, ranks: int, *, silent: set[int], dead: set[int]) -> None:
        self.silent, self.dead, self.go_on = silent, dead, threading.Event()
        self.asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        here = list(range(1, ranks))
        membership = SimpleNamespace(here=here, alive=lambda step: [p for p in here if p not in self.dead])
        self.job = SimpleNamespace(membership=membership, steps=SimpleNamespace(own=3))

    def pull(self, rank: int, name: str, request: bytes, timeout: float, most: int) -> bytearray:
        self.asked.put(rank)
        if rank in self.silent:
            self.go_on.wait(PATIENCE)
            raise TransportError("no answer in time")
        return bytearray(request)

    def told(self, number: int) -> list[int]:
        """The next so many that are asked."""
        return sorted(self.asked.get(timeout=PATIENCE) for _ in range(number))


def scaler(scale: float, tracker: int, peers: Peers | None = None) -> GradScaler:
    """Of a rank that has loaded a checkpoint with these and is at step 0 of its own."""
    reliable = SimpleNamespace(serve=lambda name, handler: None, pull=peers.pull if peers else None)
    communicator = SimpleNamespace(step=0, reliable=reliable, job=peers.job if peers else None)
    state: Any = SimpleNamespace(
        rank=0, scaler=None, shards=1, shares_scale=False, communicator=communicator, loss_scale=0.0
    )
    made = GradScaler.__new__(GradScaler)
    super(GradScaler, made).__init__("cpu", scale)
    made.load_state_dict = super(GradScaler, made).load_state_dict  # type: ignore[method-assign]
    made.load_state_dict(made.state_dict() | {"_growth_tracker": tracker})
    made._join(state)
    return made


def test_who_has_come_back_goes_by_what_it_is_told_and_not_by_its_checkpoint() -> None:
    """Its own epoch begins later than the job's, which loaded an older checkpoint, and would win. Rule: clock-32."""
    own = scaler(131072.0, 100)
    told = (0, -1500 & STEP_MASK, 65536.0, 131072.0, 500)
    assert own._scales.epoch.beats(Epoch(*told[:3]))
    own.take_over(told, 650)
    assert (own.epoch, own.newest) == (told, Epoch(*told[:3]))
    assert own.get_scale() == 131072.0
    assert own._growth_tracker is not None
    assert int(own._growth_tracker) == 150


def test_what_others_have_written_meanwhile_still_wins() -> None:
    own = scaler(65536.0, 0)
    own._answer(Epoch(1, 640, 32768.0).pack())
    own.take_over((0, 0, 65536.0, 65536.0, 0), 650)
    assert own.newest == Epoch(1, 640, 32768.0)
    assert own.get_scale() == 32768.0


def test_an_epoch_is_told_to_all_live_ranks_however_many_are_dead() -> None:
    """Each dead one kept a thread for a minute, and there are eight. One that had only been stopped is told later."""
    dead = set(range(1, 10))
    peers = Peers(14, silent=set(dead), dead=dead)
    own = scaler(65536.0, 0, peers)
    try:
        own._tell(Epoch(1, 3, 32768.0))
        assert peers.told(4) == [10, 11, 12, 13]
        peers.silent.discard(4)
        peers.dead.discard(4)
        assert peers.told(1) == [4]
        own._tell(Epoch(2, 3, 16384.0))
        assert peers.told(5) == [4, 10, 11, 12, 13]
        assert peers.asked.empty()
    finally:
        peers.go_on.set()
        own.close()


def test_a_process_can_end_while_a_rank_does_not_answer() -> None:
    """Threads of a pool are waited for at the end of a process."""
    peers = Peers(3, silent={1}, dead=set())
    own = scaler(65536.0, 0, peers)
    try:
        own._tell(Epoch(1, 3, 32768.0))
        assert peers.told(2) == [1, 2]
        tellers = [thread for thread in threading.enumerate() if thread.name.startswith("tailbound-scale")]
        assert [thread.daemon for thread in tellers].count(True) == len(tellers) > 0
    finally:
        peers.go_on.set()
        own.close()
    assert not any(thread.is_alive() for thread in tellers)


def test_a_scaler_whose_job_is_over_scales_as_torchs_and_may_be_given_to_another() -> None:
    """Lightning fits twice with one scaler; or ``register`` has failed after it took the scaler in."""
    import pytest
    import torch

    from tailbound.errors import ConfigError
    from tailbound.torch.scaler import adopt

    served = []

    def state(*, job: bool) -> Any:
        reliable = SimpleNamespace(serve=lambda name, handler: served.append(handler))
        communicator = SimpleNamespace(step=0, reliable=reliable)
        made = SimpleNamespace(rank=0, scaler=None, shards=1, shares_scale=False, loss_scale=1.0)
        made.communicator = communicator if job else None
        return made

    first, second, one_rank = state(job=True), state(job=True), state(job=False)
    given: Any = torch.amp.GradScaler("cpu", 8.0, growth_interval=2)
    adopt(first, given)
    with pytest.raises(ConfigError, match="one for each registered model"):
        adopt(second, given)
    given.close()  # as the state does
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 1.0)
    for gradient in (8.0, float("inf")):  # nobody is told of the overflow
        weight.grad = torch.full((1,), gradient)
        given.step(optimizer)
        given.update()
    assert (weight.tolist(), given.get_scale(), first.loss_scale) == ([-1.0], 4.0, 8.0)
    adopt(one_rank, given)
    adopt(second, given)
    assert (second.scaler, second.loss_scale, given.epoch[2]) == (given, 4.0, 4.0)
    epoch = Epoch(9, 0, 2.0)
    assert served[0](epoch.pack()) == []  # that of the first job
    assert given.newest != epoch
    assert list(served[1](epoch.pack())) == [epoch.pack()]
