"""A schedule carried out by point-to-point messages of a process group, Gloo's over TCP.

All receives of an all-reduce are posted before its first send, so that no message waits for one. A chunk leaves as soon
as it is what it has to be and what left before it is gone; a rank waits for nothing else.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from tailbound_lab.bench.rivals.schedules import ADD, Move, Schedule


class _Piece(NamedTuple):
    """Entries lo..hi to or from ``peer``; ``add``: to be added and not to replace."""

    peer: int
    lo: int
    hi: int
    add: bool


class Exchange:
    """All-reduces of float32 buffers of ``numel`` entries by ``schedule``, of one rank of ``group``."""

    def __init__(self, schedule: Schedule, numel: int, group: dist.ProcessGroup) -> None:
        self._group = group
        rank = group.rank()
        cuts = [numel * i // schedule.chunks for i in range(schedule.chunks + 1)]
        bounds = list(pairwise(cuts))
        self._rounds = [
            (
                _pieces([move for move in moves if move.src == rank], bounds, of_peer=1),
                _pieces([move for move in moves if move.dst == rank], bounds, of_peer=0),
            )
            for moves in schedule.rounds
        ]
        arriving = sum(p.hi - p.lo for _, received in self._rounds for p in received if p.add)
        self._arrived = torch.empty(arriving)  # what is to be added

    def sum(self, buffer: torch.Tensor) -> None:
        """``buffer``, f32[numel], becomes the sum of all ranks'.

        What replaces a chunk arrives in ``buffer`` itself: it is a whole sum, so what stood there has long been sent.
        """
        expected: list[list[tuple[Any, _Piece, torch.Tensor]]] = []
        used = 0
        for number, (_, received) in enumerate(self._rounds):
            expected.append([])
            for piece in received:
                target = buffer[piece.lo : piece.hi]
                if piece.add:
                    target = self._arrived[used : used + piece.hi - piece.lo]
                    used += piece.hi - piece.lo
                work = dist.irecv(target, group=self._group, group_src=piece.peer, tag=number)
                expected[-1].append((work, piece, target))
        leaving: list[tuple[Any, _Piece]] = []

        def take(work: Any, piece: _Piece, target: torch.Tensor) -> None:
            work.wait()
            if piece.add:
                for going in [each for each in leaving if _overlap(each[1], piece)]:
                    going[0].wait()  # it must leave as it was
                    leaving.remove(going)  # Gloo waits for one more message if it is asked twice
                buffer[piece.lo : piece.hi] += target

        for number, (sent, _) in enumerate(self._rounds):
            for piece in sent:
                for before in expected[:number]:
                    for arrival in [each for each in before if _overlap(each[1], piece)]:
                        take(*arrival)
                        before.remove(arrival)
            for work, _ in leaving:  # a link that is shared by two rounds would make the first one late
                work.wait()
            leaving = [
                (dist.isend(buffer[p.lo : p.hi], group=self._group, group_dst=p.peer, tag=number), p) for p in sent
            ]
        for arrivals in expected:
            for arrival in arrivals:
                take(*arrival)
        for work, _ in leaving:
            work.wait()


def _overlap(one: _Piece, other: _Piece) -> bool:
    return one.lo < other.hi and other.lo < one.hi


def _pieces(moves: list[Move], bounds: list[tuple[int, int]], of_peer: Literal[0, 1]) -> list[_Piece]:
    """Neighbouring chunks to or from one peer are one message."""
    found = []
    ordered = sorted(moves, key=lambda move: (move[of_peer], move.chunk))

    def message(item: tuple[int, Move]) -> tuple[int, str, int]:
        at, move = item
        return move[of_peer], move.kind, move.chunk - at

    for (peer, kind, _), run in groupby(enumerate(ordered), message):
        chunks = [move.chunk for _, move in run]
        found.append(_Piece(peer, bounds[chunks[0]][0], bounds[chunks[-1]][1], kind == ADD))
    return [piece for piece in found if piece.hi > piece.lo]
