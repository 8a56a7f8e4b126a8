"""The udp datapath with mends taken back, one at a time, to see that exploring finds again what they mended.

The datapath's own sources, with the lines that were mended made to depend on a word of padding in the control record:
one compilation serves all. A line that is not there any more, or twice, is an error.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from interleave.explorer import Walker
from tailbound.datapath import ingest, ops, rows

#: What stands in ``control.pad`` while a mend is taken back.
FAR_LABELS, WRONG_SCALE, COUNTED, TWO_LOCKS = 3, 4, 5, 6

_GOES_ON = "return GO_ON if h.type == PacketType.RESULT else gone(h)"
_PRESENT = "    present = presence_at(t.presence, position)\n"
_CHANGES = {
    ops: [
        # a label from any distance opens a record, and takes that of an op in progress
        (
            "    return serial(op, c.released) > OP_STEPS << OP_INDEX_BITS",
            f"    return c.pad != {FAR_LABELS} and serial(op, c.released) > OP_STEPS << OP_INDEX_BITS",
        ),
        # a result needs a record, as other packets do
        (_GOES_ON, _GOES_ON.replace("RESULT else", f"RESULT and c.pad != {FAR_LABELS} else")),
    ],
    rows: [
        # the right exponent is added onto a sum with another one
        (
            "    wrong_sum = same and right and ",
            f"    wrong_sum = control_at(t.control, 0).pad != {WRONG_SCALE} and same and right and ",
        ),
        # what is taken off for a sum that is stored over goes by the live set of now
        (
            "        r.rows_complete -= np.int32(record.counted)\n",
            (
                "        live = control_at(t.control, 0)\n"
                f"        counted = covers(record.ranks, live.live) if live.pad == {COUNTED} else record.counted == 1\n"
                "        r.rows_complete -= np.int32(counted)\n"
            ),
        ),
        # between the row's lock and the one under which presence was written a processor is held up
        (
            _PRESENT,
            f"    if control_at(t.control, 0).pad == {TWO_LOCKS}:\n        return Verdict.RESULT_TAKEN\n{_PRESENT}",
        ),
    ],
    ingest: [],
}


def _changed(module: ModuleType, folder: Path) -> None:
    """Writes the sources of ``module`` with its lines changed, and imports them under a name beside the original's."""
    assert module.__file__ is not None
    text = Path(module.__file__).read_text()
    for old, new in _CHANGES[module]:
        assert text.count(old) == 1, f"{module.__name__} has changed: say here what takes the mend back now: {old!r}"
        text = text.replace(old, new)
    for name in ("ops", "rows"):
        text = text.replace(f"from tailbound.datapath.{name} import", f"from taken_back_{name} import")
    name = f"taken_back_{module.__name__.rsplit('.', 1)[1]}"
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def defective(folder: Path) -> dict[int, Walker]:
    """Walkers through the datapath without one of the mends, by the number of the mend; 0: with all of them."""
    for module in (ops, rows, ingest):
        _changed(module, folder)
    take_in = sys.modules["taken_back_ingest"].ingest
    return {mend: Walker(take_in, pad=mend) for mend in (0, FAR_LABELS, WRONG_SCALE, COUNTED, TWO_LOCKS)}
