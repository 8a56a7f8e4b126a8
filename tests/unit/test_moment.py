"""When a replica may be read by other threads (clock-21)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytestmark = pytest.mark.needs("torch")

PATIENCE = 30
LAST = (1 << 22) - 1  # steps are serial numbers


@pytest.mark.parametrize(
    ("done", "asked", "later", "said"),
    [
        ([], 4, False, "step 4 has not ended here yet"),
        ([("settle", 4)], 4, False, 4),
        ([("settle", 4)], 5, False, "step 5 has not ended"),
        ([("settle", 4)], 3, False, "step 3 is past"),
        ([("settle", 4)], 3, True, 4),
        ([("settle", 4), ("disturb",)], 4, False, "step 4 is past"),
        ([("settle", 4), ("disturb",)], 4, True, "not ended"),
        ([("settle", 4), ("close",)], 4, False, "closing"),
        ([("settle", LAST)], 0, False, "not ended"),
        ([("settle", LAST), ("settle", 0)], LAST, False, "past"),
        ([("settle", 4), ("change",)], 4, False, "step 4 is past"),  # nobody reads within, whatever settles there
        ([("settle", 4), ("change",), ("settle", 5)], 4, True, "not ended"),
        ([("settle", 4), ("change",), ("settle", 5), ("leave",)], 5, False, 5),
        ([("settle", 5), ("change",), ("disturb",), ("leave",)], 5, False, "step 5 is past"),
    ],
)
def test_only_the_step_asked_for_and_only_while_it_stands_still(
    done: list[tuple[Any, ...]], asked: int, later: bool, said: int | str
) -> None:
    from tailbound.torch.moment import Moment
    from tailbound.transport.reliable import Refusal

    moment = Moment()
    change = moment.change()
    for name, *arguments in done:
        if name == "change":
            change.__enter__()
            assert moment.changing
        elif name == "leave":
            change.__exit__(None, None, None)
            assert not moment.changing
        else:
            getattr(moment, name)(*arguments)
    if isinstance(said, str):
        with pytest.raises(Refusal, match=said), moment.reading(asked, 0, or_later=later):
            pass
    else:
        with moment.reading(asked, 0, or_later=later) as stands:
            assert stands == said


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
