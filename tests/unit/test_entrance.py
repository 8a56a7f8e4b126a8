"""How a rank that has come back is let in, without processes: what ends the wait of either side (clock-32)."""

from __future__ import annotations

import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from solo import Kept
from tailbound.collective.comeback import Part
from tailbound.errors import ConfigError, LayoutError, TransportError
from tailbound.transport.reliable import Refusal

pytest.importorskip("torch", reason="missing capability 'torch': pip install 'tailbound[torch]'")
import torch

from tailbound.torch import entrance, kept
from tailbound.torch.entrance import _ASK, _SILENCE, Entrance
from tailbound.torch.finished import Layout
from tailbound.torch.resync import NEVER
from tailbound.torch.standing import Standing


def make(rank: int, part: Part, other: Any = None) -> tuple[Entrance, Any, Any]:
    """A rank's entrance, its reliable path, which asks that of ``other``, and the rest of it."""
    reliable: Any = SimpleNamespace(handlers={}, asked=[], before_close=lambda _: None)
    reliable.serve = reliable.handlers.__setitem__

    def pull(_: int, name: str, request: bytes, *__: object) -> bytearray:
        reliable.asked.append(name)
        return bytearray(b"".join(other.handlers[name](request)))

    reliable.pull = pull
    bucket = SimpleNamespace(index=0, numel=1, dtype=torch.float32, last=True, parts="")
    layout: Any = Layout()
    layout._buckets = {0: bucket}
    own = Standing(1, form=layout.digest())
    resync = SimpleNamespace(
        moment=SimpleNamespace(step=4), giving=set(), given=0, counters=Counter(),
        standings=SimpleNamespace(now=lambda ranks: dict.fromkeys(ranks, own)),
    )  # fmt: skip
    communicator = SimpleNamespace(
        reliable=reliable, config=SimpleNamespace(rank=rank), part=part, job=SimpleNamespace(peers=[1 - rank]),
        step=5, hold=lambda _: None, entrance=lambda: b"", enter=lambda _: {0},
    )  # fmt: skip
    made: Any = Entrance(communicator, resync, layout)
    return made, reliable, resync


def _admitted(donor: Entrance) -> threading.Thread:
    """A thread that ends once ``donor`` has let somebody ask to be let in, and waits no longer."""

    def run() -> None:
        while not donor._guests:
            time.sleep(0.001)
        donor.admit(held=False)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_who_can_never_be_let_in_hears_so_at_once() -> None:
    donor, path, _ = make(0, Part.INSIDE)
    guest, asking, resync = make(1, Part.OUTSIDE, path)

    def take(*_: Any) -> int:
        raise Refusal(f"{NEVER}: the state of extra_state['thing']")

    resync.take_state = take
    begun = time.monotonic()
    thread = _admitted(donor)
    with pytest.raises(ConfigError, match=r"cannot give its state: .*extra_state\['thing'\]"):
        guest.enter(60)
    thread.join(_SILENCE / 2)  # the donor does not wait for it, either
    assert not thread.is_alive()
    assert asking.asked.count("enter") == 1
    assert time.monotonic() - begun < _SILENCE
    donor._communicator.entrance = lambda: 1 // 0  # another failure may pass; the guest is forgotten
    thread = _admitted(donor)
    with pytest.raises(Refusal, match="ZeroDivisionError"):
        path.handlers["enter"](_ASK.pack(1, 2000))
    thread.join(_SILENCE / 2)
    assert not thread.is_alive()


def test_a_donor_that_ends_no_step_is_left_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "_TURN", 0.2)
    guest, asking, _ = make(2, Part.OUTSIDE)
    guest._communicator.job.peers = [0, 1]
    asked: list[int] = []

    def pull(rank: int, name: str, *_: object) -> bytearray:
        if name == "enter":
            asked.append(rank)
            if rank == 0:
                raise Refusal("no step has ended here yet")
            raise ConfigError("rank 1 was asked")
        return bytearray()

    monkeypatch.setattr(asking, "pull", pull)
    with pytest.raises(ConfigError, match="rank 1 was asked"):
        guest.enter(30)
    assert asked.count(0) > 1


def test_buckets_of_other_ranks_are_waited_for_and_other_ones_are_refused() -> None:
    guest, _, resync = make(1, Part.OUTSIDE)
    resync.standings.now = lambda *_: {0: Standing(1, form=b"x" * 16)}
    assert [guest.enter(60) for _ in range(3)] == [False] * 3
    with pytest.raises(LayoutError, match="other buckets here than on rank 0, after 4 steps"):
        guest.enter(60)
    resync.standings.now = lambda *_: {0: Standing(1)}
    with pytest.raises(TransportError, match="their buckets have not settled"):
        guest.enter(0)


def test_a_donor_waits_while_its_state_is_on_the_way_and_then_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "_SILENCE", 0.2)
    monkeypatch.setattr(entrance, "_PEER", 0.0)
    donor, _, resync = make(0, Part.INSIDE)
    for given, least in ((0, 0.0), (1e8, 1.0)):  # a second to load
        donor._guests.add(1)
        resync.giving, resync.given = {1}, given
        thread = threading.Thread(target=lambda: donor.admit(held=False), daemon=True)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        resync.giving = set()
        begun = time.monotonic()
        thread.join(10)
        assert not thread.is_alive()
        assert time.monotonic() - begun >= least


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"good": Kept(1), "bad": Kept(lambda: None)}, r"extra_state\['bad'\] cannot be given"),
        ({"good": Kept(1), "bad": Kept(Kept(1))}, r"extra_state\['bad'\] cannot be loaded"),
        ([1], r"extra_state= is of type list: give a dictionary"),
        ({"a": 3}, r"extra_state\['a'\] is of type int: give .* what has state_dict\(\) and load_state_dict\(\)"),
        ({"": Kept(1)}, r"extra_state\[''\] is of type Kept: give a dictionary, {'scheduler': ...}"),
        ({3: Kept(1)}, r"extra_state\[3\] is of type Kept: give a dictionary, {'scheduler': ...}"),
    ],
)
def test_states_that_cannot_travel_are_refused_by_name(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        kept.check(given)
