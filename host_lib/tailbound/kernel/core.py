"""The C library of ``host_lib/core``: the kernel programs' own rules, for a process.

It comes with a wheel of `make wheel`, or is built where it is first needed, from the sources here. A library names its
sources, and is taken only beside these.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tailbound.errors import CapabilityError
from tailbound.kernel import built, cache, objects
from tailbound.kernel.cache import assets

#: Folders of its sources.
_PARTS = ("core", "ebpf", "xdp_programs")
_OPTIONS = (
    *("-O3", "-std=gnu11", "-shared", "-fPIC", "-pthread", "-fno-strict-aliasing", "-fvisibility=hidden"),
    *("-DTB_USER", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-psabi"),
)
#: Section of the library that has its signature, as text.
_SECTION = "tailbound"
_P, _U32, _U64, _S64, _INT = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int
_Byte = ctypes.c_char.from_buffer
#: Results and arguments, as in the sources.
_FUNCTIONS = {
    "tb_open": (_P, _P, _U32, _U32, _P, _P),
    "tb_close": (None, _P),
    "tb_take_in": (_INT, _P, _P, _U32, _U32, _P, _U64, _INT, _P, _INT),
    "tb_put_key": (None, _P, _U32, _P, _U32),
    "tb_fence": (None, _P),
    "tb_clear": (_U64, _INT),
    "tb_udp": (_INT, _P, _INT, _INT, _INT, _INT),
    "tb_stamp": (None, _P, _P, _U32),
    "tb_prove_packet": (None, _P, _P, _U32, _P),
    "tb_proven": (_INT, _P, _U32, _P, _P, _U32),
    "tb_line_open": (_P, _P, _P, _P, _P),
    "tb_echoed": (None, _P, _P, _S64, ctypes.c_double, _S64),
    "tb_line_close": (None, _P),
    "tb_submit": (_INT, _P, _U32, _P, _U32, _S64, _U32, _U32, _P, _U32, _P),
    "tb_cancel": (_U64, _P, _U32),
    "tb_begin": (None, _P),
    "tb_next": (_INT, _P),
    "tb_took": (None, _P, _U32, _U32),
    "tb_pump": (None, _P, _INT, _S64),
    "tb_end": (None, _P, _S64),
    "tb_time_probes": (None, _P, _S64),
    "tb_pace": (ctypes.c_double, _P),
    "tb_say": (_INT, _P, _U32, ctypes.c_char_p, _U32),
    "tb_add_flags": (None, _P, _U32, _U32, _P, _U32, _P),
    "tb_next_stamp": (_U64, _P),
    "tb_write_word": (_U32, _P, _U32, _P, ctypes.c_char_p, _U32, _P),
    "tb_next_letter": (_U32, _P, _P),
    "tb_take_word": (_INT, _P, _P, _U32),
    "tb_heed": (_INT, _P, ctypes.c_char_p, _U32),
    "tb_serve": (_U32, _P, _S64),
    "tb_remember": (None, _P, _U32, _U32),
    "tb_said": (_U32, _P, _U32),
    "tb_publish": (None, _P),
    "tb_ask_others": (None, _P, _S64),
    "tb_question": (None, _P, _U32, _S64, _S64),
    "tb_spoke": (None, _P, _P, _U32, _S64),
    "tb_asked_open": (_P, _U32),
    "tb_asked_close": (None, _P),
    "tb_note_request": (_INT, _P, _U32, _U32, _INT, _U32, _U32, _U32, ctypes.c_char_p, _U32),
    "tb_answer": (None, _P, _S64),
    "tb_enter": (None, _P, _P),
    "tb_leave": (None, _P, _P),
    "tb_begin_turn": (None, _P, _INT, _INT),
    "tb_next_op": (_INT, _P, _S64),
    "tb_move": (_INT, _P, _P, _S64),
    "tb_newest": (_U32, _P, _U32),
    "tb_stirred": (_INT, _P),
    "tb_listen_to": (_U64, _P, _P, _S64),
    "tb_start_clock": (_S64, _P, _P, _S64),
    "tb_stand_still": (None, _P, _S64),
    "tb_silence": (_S64, _P, _P, _S64),
    "tb_hand": (None, _P, _P),
    "tb_send_own": (_INT, _P, _P, _S64),
    "tb_launch": (_U32, _P, _P, _S64),
    "tb_summed": (None, _P, _P, _P),
    "tb_gather": (_U32, _P, _P, _P),
    "tb_point_own": (None, _P, _P),
    "tb_read": (_U32, _P, _P, _U32),
    "tb_account": (None, _P, _P, _INT, _INT, _P, _P, _P),
    "tb_seal_rows": (_INT, _P, _U32, _U32, _U32),
    "tb_judge_loss": (_U32, _P, _S64, _S64),
    "tb_close_first": (_INT, _P, _P, _INT, _S64),
    "tb_hand_out": (_INT, _P, _P, _S64),
    "tb_order": (None, _P),
    "tb_finish": (_U32, _P, _P, _P, _S64),
    "tb_saved": (_S64, _P, _S64),
    "tb_patience": (_S64, _P, _P),
    "tb_worth": (_INT, _P, _P, _S64, _S64, _S64),
    "tb_charge": (None, _P, _P, _S64),
    "tb_woke": (None, _P, _S64),
    "tb_waited": (None, _P, _INT),
    "tb_start_half": (None, _P, _S64, _S64, _S64, _S64),
    "tb_lasts": (_S64, _P, _P, _INT),
    "tb_longest": (_S64, _P, _P, _INT),
    "tb_gone": (None, _P, _U32, _U32, ctypes.c_char_p, _U32),
    "tb_bitmap": (_U32, _P, _U32, _P, _U32, _P),
    "tb_learn_last": (None, _P, _S64),
    "tb_requests": (_U32, _P, _U32, _P),
    "tb_pto": (_S64, _P, _U32),
    "tb_answered": (None, _P, _S64, _S64),
    "tb_sleep": (_S64, _P, _S64),
    "tb_look_out": (_U32, _P, _S64),
    "tb_first": (_S64, _P, _S64),
    "tb_take_opened": (None, _P),
    "tb_peek": (_S64, _P),
    "tb_work": (_U32, _P, _S64, _P),
    "tb_crew_open": (_P, _P, _U32),
    "tb_crew_close": (None, _P),
    "tb_appoint": (_INT, _P),
    "tb_dismiss": (None, _P),
    "tb_back": (_U32, _P),
    "tb_take": (_INT, _P, _INT, _P, _INT),
    "tb_repeat": (None, _INT, _INT, _S64, _P, _P, _U32, _P, _U32, _P),
}


def address(array: Any) -> int:
    """Of the first byte of a numpy array without gaps; 0 of an empty one.

    Raises:
        ValueError: it has gaps.
    """
    if not array.flags.c_contiguous:
        raise ValueError(f"an array {array.shape} has gaps: the library walks through it without strides")
    if not array.size:
        return 0
    # ctypes takes a quarter of numpy's time, but only memory that can be written
    return ctypes.addressof(_Byte(array)) if array.flags.writeable else int(array.ctypes.data)


class Core(NamedTuple):
    """The library, twice: ``fast`` keeps the GIL during a call, ``waits`` drops it."""

    fast: ctypes.PyDLL
    waits: ctypes.CDLL


def compiler() -> str | None:
    """The C compiler of this machine."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def folders() -> list[Path]:
    """Where its sources are."""
    return [assets(part) for part in _PARTS]


def signature() -> str:
    """What the sources are, as text: other ones have another."""
    return cache.key(path.read_bytes() for folder in folders() for path in sorted(folder.glob("*.[ch]")))


def command(cc: str, out: Path, where: Sequence[Path], more: Sequence[str] = ()) -> list[str]:
    """What builds the library as ``out``, with ``more`` options, from folders of which the first has the C files."""
    include = [f"-I{folder}" for folder in where]
    files = [str(path) for path in sorted(where[0].glob("*.c"))]
    return [cc, *_OPTIONS, f'-DTB_SIGNATURE="{signature()}"', *include, *more, *files, "-o", str(out)]


def compiled() -> bytes:
    """A library of the sources here.

    Raises:
        CapabilityError: no compiler, or it fails.
    """
    cc = compiler()
    if cc is None:
        raise CapabilityError(
            "the C library of tailbound did not come with this installation, and there is no C compiler to build it: "
            "apt-get install gcc libc6-dev, or install a wheel of `make wheel`"
        )
    help_ = "apt-get install gcc libc6-dev, or install a wheel of `make wheel`"
    return cache.compiled(lambda out: command(cc, Path(out), folders()), help_)


def name() -> str:
    """The file of the library in a wheel."""
    return f"core-{platform.machine()}.so"


def _shipped() -> Path | None:
    """The library that came with the package, if it is of the sources here."""
    path = built.FOLDER / name()
    try:
        return path if objects.section_text(path.read_bytes(), _SECTION) == signature() else None
    except (OSError, ValueError):
        return None


def origin() -> str | None:
    """Where the library comes from: the file in the package, or the compiler; None: neither is there."""
    return str(_shipped() or compiler() or "") or None


def find() -> Path:
    """The library's file; it is built if it is not there.

    Raises:
        CapabilityError: there is none, and no compiler that can build it.
    """
    if path := _shipped():
        return path
    return cache.path(cache.key([platform.machine(), *_OPTIONS, signature()]), compiled, ".so")


def load(path: Path) -> Core:
    """The functions of a library.

    Raises:
        OSError: it cannot be loaded here.
    """
    core = Core(ctypes.PyDLL(str(path)), ctypes.CDLL(str(path)))
    for library in core:
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    return core


@functools.cache
def core() -> Core:
    """The library of this process.

    Raises:
        CapabilityError: there is none, and none can be built or loaded.
    """
    path = find()
    try:
        return load(path)
    except OSError as error:
        raise CapabilityError(f"{path} cannot be loaded ({error}): remove it, and let gcc build another one") from error
