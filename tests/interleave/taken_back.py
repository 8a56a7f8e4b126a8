"""The C library with mends taken back, one at a time, to see that exploring finds again what they mended.

The rules' own sources, with the lines that were mended made to depend on a word of the control record that this
datapath has no use for: one library serves all. A line that is not there any more, or twice, is an error.
"""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

from interleave.explorer import Walker
from tailbound.datapath.tables import Tables
from tailbound.kernel import core

#: What stands in ``control.group`` while a mend is taken back.
FAR_LABELS, UNMOVED, COUNTED, TWO_LOCKS = 3, 4, 5, 6

_REACH = "return tb_distance(op, TB_READ_ONCE(control->released)) > TB_OP_STEPS << TB_OP_INDEX_BITS;"
_NEWER = "return key.op - p->op - 1 < reach ? TB_TAG_NEWER : TB_TAG_OLD;"
_GOES_ON = "\tif (p->type == TB_TYPE_RESULT)\n\t\treturn TB_GO_ON;\n\treturn p->type == TB_TYPE_CONTRIBUTION"
_JOINS = "tb_slot_join(record, p, exponent, weight, spare, &fit);\n"
_COUNTS = "complete = tb_slot_count(record, control->live);"
_PRESENT = "\t\ttb_store_release(present, here.word);\n"
_TAKEN = "\tif (verdict != TB_VERDICT_RESULT_TAKEN)\n\t\treturn verdict;\n"
_FAR = f"(control->group == {FAR_LABELS} ? tb_distance(key.op, p->op) > 0 : key.op - p->op - 1 < reach)"
_CHANGES = {
    "op.h": [
        # a label from any distance opens a record, and takes that of an op in progress
        (_REACH, _REACH.replace("return ", f"return control->group != {FAR_LABELS} && ")),
        (_NEWER, _NEWER.replace("key.op - p->op - 1 < reach", _FAR)),
    ],
    "ingest.h": [
        # a result needs a record, as other packets do
        (
            _GOES_ON,
            "\tconst struct tb_control *control = TB_LOOKUP(control, 0);\n\n"
            + _GOES_ON.replace("_RESULT)", f"_RESULT && control->group != {FAR_LABELS})"),
        ),
        # a sum stays as it is, and only its record is moved
        (_JOINS, _JOINS + f"if (control->group == {UNMOVED}) fit.move = 0;\n"),
        # a row does not remember that it was counted
        (_COUNTS, f"{_COUNTS} if (control->group == {COUNTED}) record->counted = 0;"),
        # between the row's lock and the one under which presence was written a processor is held up
        (_PRESENT, f"\t\tif (control->group != {TWO_LOCKS})\n\t{_PRESENT}"),
        (_TAKEN, _TAKEN.replace("_TAKEN)", f"_TAKEN || control->group == {TWO_LOCKS})")),
    ],
}


def _write(folder: Path) -> None:
    """Writes all sources into ``folder``, with lines changed."""
    for path in (path for where in core.folders() for path in where.glob("*.[ch]")):
        text = path.read_text()
        for old, new in _CHANGES.get(path.name, ()):
            assert text.count(old) == 1, f"{path} has changed: say here what takes the mend back now: {old!r}"
            text = text.replace(old, new)
        (folder / path.name).write_text(text)
    for program in folder.glob("*.bpf.c"):
        program.unlink()


def defective(folder: Path) -> dict[int, Walker]:
    """Walkers through the datapath without one of the mends, by the number of the mend; 0: with all of them."""
    _write(folder)
    cc = core.compiler()
    assert cc is not None
    out = folder / "taken_back.so"
    subprocess.run(core.command(cc, out, [folder], ["-O1"]), check=True)
    make = partial(Tables, library=core.load(out))
    return {mend: Walker(make, group=mend) for mend in (0, FAR_LABELS, UNMOVED, COUNTED, TWO_LOCKS)}
