"""Control packets of the ``xdp`` datapath: a flood of them leaves room for ops."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from tailbound.datapath.xdp import XdpDatapath
from tailbound.wire.address import words_of
from tailbound.wire.packets import DTYPES
from tailbound.wire.schema import HEADER_BYTES


def test_a_flood_of_control_packets_is_taken_in_helpings() -> None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taker,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        taker.bind(("127.0.0.1", 0))
        taker.setblocking(False)
        sender.connect(taker.getsockname())
        peers = np.zeros(2, DTYPES["tb_peer"])
        peers["address"] = words_of("127.0.0.1").address
        path = cast(Any, SimpleNamespace(socket=taker, store=SimpleNamespace(width=64, peers=peers), _strangers=0))
        sent = [bytes(HEADER_BYTES) + number.to_bytes(4, "big") for number in range(400)]
        for data in sent:
            sender.send(data)
        helpings = [XdpDatapath.control_packets(path) for _ in range(3)]
        assert [len(helping) for helping in helpings] == [256, 144, 0]
        assert [data for helping in helpings for data in helping] == sent
        peers["address"] = words_of("127.0.0.2").address  # of somebody else, which a helping counts as well
        for data in sent:
            sender.send(data)
        assert XdpDatapath.control_packets(path) == []
        assert len(taker.recv(100)) == HEADER_BYTES + 4
