"""StragglAR's schedule (Devraj et al., "Accelerating AllReduce with a Persistent Straggler", arXiv 2505.23523, 2025).

The n - 1 others reduce-scatter while one rank is late, a chunk for each. Once it is there, it exchanges a chunk with
one of them in every round: the sum of the others for its own part, so that both have the whole. The rest spread the
chunks that are whole. No rank sends or receives more than one chunk a round. Built from the paper's idea and from the
counting below, not from the authors' code.

n - 1 rounds are needed for the exchanges. The last chunk is then on two ranks, and every round at most doubles who has
it, so at least n - 1 + ceil(log2 n) - 1 rounds are needed. The paper reaches n + log2 n - 2 for powers of two, and so
does ``_doubling``. For other n ``_greedy`` needs n + ceil(log2 n) - 2 or up to two more; what the paper needs for these
is not known to us.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tailbound.errors import ConfigError
from tailbound_lab.bench.rivals.schedules import ADD, COPY, Move, Round, Schedule, scattered


def stragglar(n: int, straggler: int) -> Schedule:
    """Reduce-scatter of the others (n - 2 rounds, which the delay hides), then ``late_rounds``.

    Raises:
        ConfigError: fewer than two ranks, or no such straggler.
    """
    if not 0 <= straggler < n or n < 2:
        raise ConfigError(f"StragglAR of {n} ranks whose straggler is rank {straggler}: give two ranks or more")
    others = tuple(rank for rank in range(n) if rank != straggler)
    ranks = (*others, straggler)
    late = tuple(
        tuple(move._replace(src=ranks[move.src], dst=ranks[move.dst]) for move in each) for each in late_rounds(n)
    )
    return Schedule(n - 1, scattered(others) + late)


def late_rounds(n: int) -> tuple[Round, ...]:
    """What follows the straggler's arrival; it is rank n - 1, and rank i < n - 1 has the others' sum of chunk i."""
    return _doubling(n) if n & (n - 1) == 0 else _greedy(n)


def _exchange(partner: int, straggler: int) -> list[Move]:
    return [Move(partner, straggler, partner, ADD), Move(straggler, partner, partner, ADD)]


def _doubling(n: int) -> tuple[Round, ...]:
    """For n = 2^L.

    Of the others 2^k are in class k < L: they have the chunk that became whole k rounds ago, and none of the other
    newest ones. In a round all but one of the last class, half of the others, pair with those of all earlier classes:
    one sends its chunk and gets the oldest, which all have then. A pair is in the next class of the earlier one. Who is
    left of the last class exchanges with the straggler and begins anew. When all have exchanged, the straggler takes
    part in the class of the newest chunk.
    """
    straggler, length = n - 1, n.bit_length() - 1
    level = [k for k in range(length) for _ in range(1 << k)]
    chunk: list[int | None] = [None] * length  # of each class; None: there was no such round
    waiting = set(range(n - 1))
    rounds = []
    for _ in range(n + length - 2):
        oldest = len(chunk) - 1
        # who has not exchanged yet first: the next one, and those that are soon in the last class again
        last = sorted((r for r in range(n - 1) if level[r] == oldest), key=lambda r: r not in waiting)
        earlier = sorted((r for r in range(n - 1) if level[r] < oldest), key=lambda r: -level[r])
        partner, *rest = last
        newest = bool(waiting)
        if newest:
            moves = _exchange(partner, straggler)
            waiting.remove(partner)
        else:
            moves = _copies(straggler, partner, chunk[0])
        level[partner] = 0
        for one, other in zip(earlier, rest, strict=True):
            moves += _copies(one, other, chunk[level[one]]) + _copies(other, one, chunk[oldest])
            level[one] = level[other] = level[one] + newest
        chunk = [*([partner] if newest else []), *chunk[:-1]]
        rounds.append(tuple(moves))
    return tuple(rounds)


def _copies(src: int, dst: int, chunk: int | None) -> list[Move]:
    return [] if chunk is None else [Move(src, dst, chunk, COPY)]


def _greedy(n: int) -> tuple[Round, ...]:
    """For any n: in every round as many send as can, those with the newest chunks before others.

    The straggler's partner is who has the fewest chunks that few have. Chunks are numbered as they become whole; what a
    rank has is a bit of each, so that the highest bit is the newest.
    """
    straggler, draw = n - 1, random.Random(n)
    has = [0] * n
    owner = list[int]()  # of the chunk of each number
    count = list[int]()  # ranks but the straggler that have it
    rounds = []
    while len(owner) < n - 1 or any(mine != has[straggler] for mine in has):
        moves, free = list[Move](), list(range(n))
        if len(owner) < n - 1:
            rare = [(number, 2.0 ** -count[number]) for number in range(len(owner)) if count[number] < n - 1]
            waiting = [rank for rank in range(n - 1) if rank not in owner]
            cost = [(sum(x for number, x in rare if has[r] >> number & 1), draw.random(), r) for r in waiting]
            partner = min(cost)[2]
            moves = _exchange(partner, straggler)
            free = [rank for rank in range(n - 1) if rank != partner]
        for dst, (src, number) in _matching(has, free, draw).items():
            moves.append(Move(src, dst, owner[number], COPY))
            has[dst] |= 1 << number
            count[number] += 1
        if straggler not in free:
            has[partner] |= 1 << len(owner)
            has[straggler] |= 1 << len(owner)
            owner.append(partner)
            count.append(1)
        rounds.append(tuple(moves))
    return tuple(rounds)


def _matching(has: Sequence[int], free: Sequence[int], draw: random.Random) -> dict[int, tuple[int, int]]:
    """(sender, number of the chunk) by receiver: as many as can be, by augmenting paths; newest chunks stay in."""
    choices = {
        src: sorted((-new.bit_length(), draw.random(), dst) for dst in free if (new := has[src] & ~has[dst]))
        for src in free
    }
    matched: dict[int, tuple[int, int]] = {}

    def placed(src: int, seen: set[int]) -> bool:
        for newest, _, dst in choices[src]:
            if dst not in seen:
                seen.add(dst)
                if dst not in matched or placed(matched[dst][0], seen):
                    matched[dst] = src, -newest - 1
                    return True
        return False

    for src in sorted(free, key=lambda rank: choices[rank][:1]):
        placed(src, set())
    return matched
