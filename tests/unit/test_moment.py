"""When a replica may be read by other threads (clock-21)."""

from __future__ import annotations

import threading

import pytest

pytestmark = pytest.mark.needs("torch")

PATIENCE = 30


def test_only_the_step_asked_for_and_only_while_it_stands_still() -> None:
    from tailbound.torch.moment import Moment
    from tailbound.transport.reliable import Refusal

    moment = Moment()
    with pytest.raises(Refusal, match="step 4 has not ended here yet"), moment.reading(4, 0):
        pass
    moment.settle(4)
    with moment.reading(4, 0) as stands:
        assert stands == 4
    with pytest.raises(Refusal, match="step 5 has not ended"), moment.reading(5, 0):
        pass
    with pytest.raises(Refusal, match="step 3 is past"), moment.reading(3, 0):
        pass
    with moment.reading(3, 0, or_later=True) as stands:
        assert stands == 4
    moment.disturb()
    with pytest.raises(Refusal, match="step 4 is past"), moment.reading(4, 0):
        pass
    with pytest.raises(Refusal, match="not ended"), moment.reading(4, 0.01, or_later=True):
        pass
    moment.close()
    with pytest.raises(Refusal, match="closing"), moment.reading(4, PATIENCE):
        pass


def test_nobody_reads_within_a_change_whatever_settles_there() -> None:
    from tailbound.torch.moment import Moment
    from tailbound.transport.reliable import Refusal

    moment = Moment()
    moment.settle(4)
    with moment.change():
        assert moment.changing
        with pytest.raises(Refusal, match="step 4 is past"), moment.reading(4, 0):
            pass
        moment.settle(5)
        with pytest.raises(Refusal, match="not ended"), moment.reading(4, 0.01, or_later=True):
            pass
    assert not moment.changing
    with moment.reading(5, 0) as stands:
        assert stands == 5
    with moment.change():
        moment.disturb()
    with pytest.raises(Refusal, match="step 5 is past"), moment.reading(5, 0):
        pass


def test_steps_are_serial_numbers() -> None:
    from tailbound.torch.moment import Moment
    from tailbound.transport.reliable import Refusal

    moment, last = Moment(), (1 << 22) - 1
    moment.settle(last)
    with pytest.raises(Refusal, match="not ended"), moment.reading(0, 0):
        pass
    moment.settle(0)
    with pytest.raises(Refusal, match="past"), moment.reading(last, 0):
        pass


def test_a_reader_waits_for_the_step_and_a_change_waits_for_the_reader() -> None:
    from tailbound.torch.moment import Moment

    moment, inside, go_on = Moment(), threading.Event(), threading.Event()
    log: list[str] = []

    def read() -> None:
        with moment.reading(7, PATIENCE):
            inside.set()
            assert go_on.wait(PATIENCE)
            log.append("read")

    def change() -> None:
        moment.disturb()
        log.append("changed")

    reader = threading.Thread(target=read)
    reader.start()
    moment.settle(6)
    moment.settle(7)
    assert inside.wait(PATIENCE)
    changer = threading.Thread(target=change)
    changer.start()
    go_on.set()
    for thread in (reader, changer):
        thread.join(PATIENCE)
    assert log == ["read", "changed"]
