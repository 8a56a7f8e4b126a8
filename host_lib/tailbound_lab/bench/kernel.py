"""What one packet costs in the kernel, by BPF_PROG_TEST_RUN: ``tailbound bench kernel``.

``xdp_programs/bench.bpf.c`` is the worker's program behind a turntable that moves rank, row and op on between repeats,
so that a million packets are really summed within one system call; its few ns are in the figures, as are those of the
kernel's own loop (row ``foreign`` shows both). ``summed`` is read from the ledger, not assumed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tailbound.datapath.xdp import shapes
from tailbound.errors import TailboundError
from tailbound.kernel import load, maps
from tailbound.kernel.core import address, core
from tailbound.kernel.maps import put_key
from tailbound.transport.control import Header
from tailbound.wire import schema
from tailbound.wire.address import words_of
from tailbound.wire.schema import MAX_RANKS, WORKER_MAPS, PacketType, Verdict, key_bytes
from tailbound.wire.tag import key_of
from tailbound_lab.bench.frames import frame
from tailbound_lab.bench.program_run import run_xdp
from tailbound_lab.bench.table import save

PORT, WIDTH, ROWS = 7000, 1408, 64
_OWN, _PEER, _COOKIE = "198.18.0.1", "198.18.0.2", 0x7A11
_NOT, _RANK, _ROW, _FORGET, _LAP = range(5)


@dataclass(frozen=True)
class Case:
    """One row: the packet, how it is turned, and the verdicts that every repeat must have."""

    name: str
    type: PacketType
    turn: int
    verdicts: tuple[Verdict, ...]
    codes: int = WIDTH
    exponent: int = 0  #: but for the first packet
    port: int = PORT
    tagged: bool = False  #: a job with a key
    forged: bool = False  #: its tag or check is wrong


_SUMMED = (Verdict.STORED, Verdict.ADDED)
CASES = (
    Case("foreign", PacketType.CONTRIBUTION, _NOT, (), port=PORT + 1),
    Case("store", PacketType.CONTRIBUTION, _ROW, (Verdict.STORED,)),
    Case("add", PacketType.CONTRIBUTION, _RANK, _SUMMED),
    Case("add-lap", PacketType.CONTRIBUTION, _LAP, _SUMMED),
    Case("add-short", PacketType.CONTRIBUTION, _RANK, _SUMMED, codes=WIDTH - 32),
    Case("refused", PacketType.CONTRIBUTION, _NOT, (Verdict.DUPLICATE,)),
    Case("result", PacketType.RESULT, _ROW, (Verdict.RESULT_TAKEN,)),
    Case("reflect", PacketType.PROBE, _NOT, (Verdict.REFLECTED,), codes=16),
    # by the same rank again and again, since the turntable has no key
    Case("again", PacketType.CONTRIBUTION, _FORGET, _SUMMED),
    Case("again-smaller", PacketType.CONTRIBUTION, _FORGET, _SUMMED, exponent=-4),
    Case("again-tagged", PacketType.CONTRIBUTION, _FORGET, _SUMMED, tagged=True),
    Case("refused-tagged", PacketType.CONTRIBUTION, _NOT, (Verdict.DUPLICATE,), tagged=True),
    Case("corrupt", PacketType.CONTRIBUTION, _NOT, (Verdict.CORRUPT,), forged=True),
    Case("forged", PacketType.CONTRIBUTION, _NOT, (Verdict.FORGED,), tagged=True, forged=True),
)


class Bench:
    """Maps and program of one loader, with a job of 256 ranks in which this rank is the last."""

    def __init__(self, loader: str, rows: int = ROWS) -> None:
        self.loader, self.rows = loader, rows
        sizes = {"width": WIDTH, "sum_rows": rows, "result_rows": rows}
        self.maps = maps.create(WORKER_MAPS, shapes(**sizes), events=True)
        defines = {"TB_PORT": PORT, "TB_WIDTH": WIDTH, "TB_SUM_ROWS": rows, "TB_RESULT_ROWS": rows}
        self.program = load.load("bench.bpf.c", "tb_bench", defines, load.WORKER_MAP_NAMES, self.maps.fds, loader)
        load.load_tagged(self.maps.fds, load.receiver_defines(PORT, WIDTH, rows), loader)
        self._key = key_of(np.random.default_rng(3).bytes(key_bytes(WIDTH) - 8), 0)
        for epoch in range(schema.KEY_EPOCHS):
            put_key(self.maps.fds["keys"], epoch, self._key)
        peers, control = self.maps.arrays["peers"], self.maps.arrays["control"][0]
        peers["address"] = words_of(_PEER).address
        control["cookie"], control["address"] = _COOKIE, words_of(_OWN).address
        control["live"][-1] = 1 << 63  # one who never sends: else a row would be complete with its first contribution
        control["weight_cap"], control["sum_rows"], control["active"] = 1, rows, 1
        control["ranks"], control["rank"] = MAX_RANKS, MAX_RANKS - 1
        self._op = 1 << schema.OP_INDEX_BITS

    def close(self) -> None:
        """Closes program and maps."""
        os.close(self.program)
        self.maps.close()

    def counted(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Ledger by verdict, over all senders and CPUs."""
        out: np.ndarray[Any, np.dtype[np.uint64]] = self.maps.arrays["ledger"]["verdict"].sum(0)
        return out

    def run(self, case: Case, repeats: int) -> dict[str, Any]:
        """One row.

        Raises:
            TailboundError: not every repeat had its verdict.
        """
        self._op += 1 << schema.OP_INDEX_BITS  # far from where the last case ended
        self.maps.arrays["control"]["released"] = self._op - 1
        self.maps.arrays["control"]["tagged"] = case.tagged
        data = self._frame(case, case.exponent)
        if case.turn in (_NOT, _FORGET) and case.type is PacketType.CONTRIBUTION and not case.forged:
            run_xdp(self.program, self._frame(case, 0), 1)  # the first is stored, or makes the others duplicates
        before = self.counted()
        duration = run_xdp(self.program, data, repeats).duration_ns
        after = self.counted() - before
        seen = int(sum(after[v] for v in case.verdicts))
        if case.verdicts and seen != repeats:
            named = {Verdict(i).name: int(n) for i, n in enumerate(after) if n}
            raise TailboundError(
                f"bench {case.name} ({self.loader}): {seen} of {repeats} packets counted; {named}; run it again"
            )
        return {
            "name": case.name,
            "loader": self.loader,
            "codes": case.codes,
            "rows": self.rows,
            "ns_per_packet": float(duration),
            "summed": int(after[Verdict.STORED] + after[Verdict.ADDED]),
            "repeats": repeats,
        }

    def _frame(self, case: Case, exponent: int) -> bytes:
        head = Header(
            version=schema.VERSION,
            type=case.type,
            cookie=_COOKIE,
            op=self._op,
            sender=0,
            owner=0 if case.type is PacketType.RESULT else MAX_RANKS - 1,
            rows=schema.MAX_RANKS,
            weight=1,
            exponent=exponent,
            contributed=self._op - 1,
            published=self._op - 1,
        )
        payload = np.random.default_rng(7).integers(1, 256, case.codes, np.uint8).tobytes()
        key = address(self._key) if case.tagged else 0
        core().fast.tb_prove_packet(ctypes.addressof(head), payload, len(payload), key)
        data = bytes(head) + payload
        if case.forged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        return frame(data, _PEER, _OWN, case.turn, case.port)


def run(
    json_path: Path | None = None, loaders: Sequence[str] = ("bcc", "clang"), quick: bool = False, rows: int = ROWS
) -> list[dict[str, Any]]:
    """Measures every case with every loader, in several interleaved passes, since neighbours make noise.

    With as many ``rows`` as a job has, a power of two, rows are out of the caches when they are turned to again.

    Returns:
        Rows with ``name, loader, codes, rows, ns_per_packet, ns_median, summed, repeats``: the best pass, and the
        median of all; also written to ``json_path``.

    Raises:
        CapabilityError: no privilege, or a compiler is missing.
        TailboundError: packets that should have been summed were not.
    """
    repeats, passes = (20_000, 2) if quick else (50_000, 11)
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        benches = []
        for loader in loaders:
            benches.append(Bench(loader, rows))
            stack.callback(benches[-1].close)
        for _ in range(passes):
            for row in [bench.run(case, repeats) for case in CASES for bench in benches]:
                found.setdefault((row["name"], row["loader"]), []).append(row)
    out = []
    for passed in found.values():
        passed.sort(key=lambda row: float(row["ns_per_packet"]))
        out.append(passed[0] | {"ns_median": passed[len(passed) // 2]["ns_per_packet"]})
    save(out, json_path)
    return out
