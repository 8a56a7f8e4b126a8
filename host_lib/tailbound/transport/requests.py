"""What many requests of the reliable path have in common: a fixed form, and that they go to many peers at once."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
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


def ask_each(ranks: Collection[int], ask: Callable[[int], T | None], name: str) -> dict[int, T]:
    """What ``ask`` gives for each of ``ranks``, all at the same time; who gives None or cannot be asked is left out.

    Args:
        ranks: of peers.
        ask: asks one of them; may raise a ``TransportError``.
        name: of the threads.
    """

    def said(rank: int) -> T | None:
        try:
            return ask(rank)
        except TransportError:
            return None

    if not ranks:
        return {}
    with ThreadPoolExecutor(min(len(ranks), AT_ONCE), name) as threads:
        answers = zip(ranks, threads.map(said, ranks), strict=True)
    return {rank: answer for rank, answer in answers if answer is not None}
