"""How a rank that has come back is let in, without processes: what ends the wait of either side (clock-32)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tailbound.collective.comeback import Part
from tailbound.errors import ConfigError
from tailbound.transport.reliable import Refusal

if TYPE_CHECKING:
    from tailbound.torch.entrance import Entrance

pytestmark = pytest.mark.needs("torch")


class Kept:
    """A state of anything."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


class Reliable:
    """What ``Entrance`` asks of the reliable path, between two ranks of this process."""

    def __init__(self) -> None:
        self.handlers: dict[str, Callable[[bytes], Iterable[Any]]] = {}
        self.other: Reliable | None = None
        self.asked: list[str] = []

    def serve(self, name: str, handler: Callable[[bytes], Iterable[Any]]) -> None:
        self.handlers[name] = handler

    def before_close(self, _: object) -> None:
        pass

    def pull(self, rank: int, name: str, request: bytes, *_: object) -> bytearray:
        self.asked.append(name)
        assert self.other is not None
        return bytearray(b"".join(self.other.handlers[name](request)))


def make(rank: int, part: Part, state: Any, slice_bytes: int = 8) -> tuple[Entrance, Reliable]:
    import torch

    from tailbound.torch.entrance import Entrance

    reliable = Reliable()
    replica = SimpleNamespace(
        parameters=[], slices=2, trained=2, describe=lambda: b"", size=lambda _: slice_bytes, copy=lambda _: []
    )
    resync = SimpleNamespace(replica=replica, sound=True, lineage=1, moment=SimpleNamespace(step=4))
    communicator = SimpleNamespace(
        reliable=reliable, config=SimpleNamespace(rank=rank), part=part, job=SimpleNamespace(peers=[1 - rank]),
        step=5, hold=lambda _: None, entrance=lambda: b"",
    )  # fmt: skip
    bucket = SimpleNamespace(index=0, numel=1, dtype=torch.float32, last=True, parts="")
    layout = SimpleNamespace(step=lambda: [bucket])
    made: Any = Entrance(communicator, resync, layout, {"thing": Kept(state)}, lambda: None)  # type: ignore[arg-type]
    return made, reliable


def _admitted(donor: Entrance) -> threading.Thread:
    """A thread that ends once ``donor`` has let somebody ask to be let in, and waits no longer."""

    def run() -> None:
        while not donor.counters["admitted"]:
            donor.admit(held=False)
            time.sleep(0.001)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_who_can_never_be_let_in_hears_so_at_once() -> None:
    from tailbound.torch.entrance import _SILENCE

    donor, path = make(0, Part.INSIDE, lambda: None)  # cannot be saved any more
    guest, asking = make(1, Part.OUTSIDE, 3)
    asking.other = path
    begun = time.monotonic()
    thread = _admitted(donor)
    with pytest.raises(ConfigError, match=r"cannot let it in.*also\['thing'\]"):
        guest.enter(60)
    thread.join(_SILENCE / 2)  # the donor does not wait for it, either
    assert not thread.is_alive()
    assert asking.asked.count("enter") == 1
    assert time.monotonic() - begun < _SILENCE


def test_another_failure_is_not_for_good_and_forgets_the_guest() -> None:
    from tailbound.torch.entrance import _ASK, _SILENCE

    donor, path = make(0, Part.INSIDE, 3)
    donor._communicator.entrance = lambda: 1 // 0  # type: ignore[assignment, method-assign, return-value]
    thread = _admitted(donor)
    with pytest.raises(Refusal, match="ZeroDivisionError"):
        path.handlers["enter"](_ASK.pack(1, 2000))
    thread.join(_SILENCE / 2)
    assert not thread.is_alive()


def test_a_donor_that_ends_no_step_is_left_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from tailbound.torch import entrance

    monkeypatch.setattr(entrance, "_TURN", 0.2)
    guest, asking = make(2, Part.OUTSIDE, 3)
    guest._communicator.job.peers = [0, 1]  # type: ignore[misc]
    _, path = make(0, Part.INSIDE, 3)
    asked: list[int] = []

    def pull(rank: int, name: str, request: bytes, *_: object) -> bytearray:
        if name == "enter":
            asked.append(rank)
            if rank == 0:
                raise Refusal("no step has ended here yet")
            raise ConfigError("rank 1 was asked")
        return bytearray(b"".join(path.handlers[name](request)))

    monkeypatch.setattr(asking, "pull", pull)
    with pytest.raises(ConfigError, match="rank 1 was asked"):
        guest.enter(30)
    assert asked.count(0) > 1


def test_a_donor_waits_as_long_as_a_slice_takes() -> None:
    from tailbound.torch.entrance import _PART
    from tailbound.torch.resync import RATE

    size = int(100 * RATE)
    donor, path = make(0, Part.INSIDE, 3, size)
    with donor._changed:
        donor._guests.add(1)
        donor._open = True
    path.handlers["entry"](_PART.pack(1, 0, b""))
    assert donor._until > time.monotonic() + size / RATE


@pytest.fixture
def _slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 bytes of a state may take a second."""
    monkeypatch.setattr("tailbound.torch.entrance.RATE", 1000.0)


@pytest.mark.usefixtures("_slow")
def test_a_donor_waits_as_long_as_what_also_names_takes() -> None:
    """The attempt was given up while it was encoded, and began anew for ever."""
    from tailbound.torch.entrance import _ASK, _PART, _SILENCE

    donor, path = make(0, Part.INSIDE, "x" * 100_000)
    waits: list[float] = []

    def left() -> float:
        """How long it waits from now on; it begins anew."""
        seconds, donor._until = donor._until - time.monotonic(), 0.0
        return seconds

    def state_dict(thing: Any = donor._also["thing"]) -> dict[str, Any]:
        waits.append(left())
        return {"kept": thing.kept}

    donor._also["thing"] = SimpleNamespace(state_dict=state_dict)  # type: ignore[assignment, unused-ignore]
    donor._open = True
    path.handlers["enter"](_ASK.pack(1, 0))
    assert waits[0] > 100, "it encodes"
    left()
    path.handlers["also"](_ASK.pack(1, 0))
    assert left() > 100, "the guest decodes"
    path.handlers["entry"](_PART.pack(1, 0, b""))
    assert left() < 2 * _SILENCE
    path.handlers["entry"](_PART.pack(1, 1, b""))
    assert left() > 100, "the guest loads"


@pytest.mark.usefixtures("_slow")
def test_a_guest_waits_as_long_as_its_donor_encodes_what_it_holds_by_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The donor's may have grown since ``register``."""
    donor, path = make(0, Part.INSIDE, "x")
    guest, asking = make(1, Part.OUTSIDE, "x")
    waits: list[float] = []

    def pull(rank: int, name: str, request: bytes, timeout: float, *_: object) -> bytearray:
        if name == "enter":
            waits.append(timeout)
            raise ConfigError("asked")
        return bytearray(b"".join(path.handlers[name](request)))

    monkeypatch.setattr(asking, "pull", pull)
    for kept in ("x", "x" * 100_000):
        donor._also["thing"].kept = kept  # type: ignore[attr-defined]
        donor._tell_also()
        donor._told = b""
        with pytest.raises(ConfigError, match="asked"):
            guest.enter(60)
    assert waits[0] < 50
    assert waits[1] > 100


def test_states_come_back_by_name_and_in_host_memory() -> None:
    import torch

    from tailbound.torch import also

    states = {"a": Kept(torch.arange(3)), "b": Kept([1, "x"])}
    found, scale = also.decode(also.encode(states, (1, 2.0)))
    assert (found["a"]["kept"].tolist(), found["b"], scale) == ([0, 1, 2], {"kept": [1, "x"]}, (1, 2.0))


@pytest.mark.parametrize(("state", "words"), [(lambda: None, "cannot be given"), (Kept(1), "cannot be loaded")])
def test_a_state_that_cannot_travel_is_named(state: object, words: str) -> None:
    from tailbound.torch import also

    with pytest.raises(ConfigError, match=rf"also\['bad'\] {words}"):
        also.check({"good": Kept(1), "bad": Kept(state)})
