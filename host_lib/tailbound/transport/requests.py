"""What many requests of the reliable path have in common: a fixed form, and that they go to many peers at once."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, TypeVar

from tailbound.errors import TransportError
from tailbound.transport.reliable import Handler, Refusal

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

#: Peers that are asked at the same time, at most, each by a thread.
AT_ONCE = 64


def of_form(form: struct.Struct, answer: Callable[..., Iterable[Buffer]]) -> Handler:
    """A handler for ``Reliable.serve``: ``answer`` gets the fields of a request, one of another size is refused."""

    def handler(request: bytes) -> Iterable[Buffer]:
        if len(request) != form.size:
            raise Refusal(f"a request of {len(request)} bytes")
        return answer(*form.unpack(request))

    return handler


def ask_each(
    ranks: Collection[int],
    ask: Callable[[int], T | None],
    name: str,
    enough: Callable[[T], bool] = lambda answer: False,
) -> dict[int, T]:
    """What ``ask`` gives for each of ``ranks``, all at the same time; who gives None or cannot be asked is left out.

    Args:
        ranks: of peers.
        ask: asks one of them; may raise a ``TransportError``.
        name: of the threads.
        enough: whether no other answer is waited for.
    """

    def said(rank: int) -> T | None:
        try:
            return ask(rank)
        except TransportError:
            return None

    if not ranks:
        return {}
    threads = ThreadPoolExecutor(min(len(ranks), AT_ONCE), name)
    answers, found = {threads.submit(said, rank): rank for rank in ranks}, dict[int, T]()
    try:
        for answer in as_completed(answers):
            if (one := answer.result()) is not None:
                found[answers[answer]] = one
                if enough(one):
                    break
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
    return {rank: found[rank] for rank in ranks if rank in found}
