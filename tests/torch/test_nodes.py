"""Several ranks a host under DDP: hosts that fail, and parts of it alone; most of its jobs are in ``test_jobs``."""

from __future__ import annotations

import contextlib

import pytest

from processes import Run

pytestmark = pytest.mark.needs("torch")


def test_stray_datagrams_neither_hold_nor_end_the_thread() -> None:
    import os
    import socket
    import time

    from tailbound.torch.node import Holds

    name, heard = f"tailbound-test/{os.getpid()}", list[bool]()
    here = Holds(name, 0, 2, heard.append)
    there = Holds(name, 1, 2, lambda _: None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stray:
        for words in (b"", b"\1", b"\1\1\1", bytes([200, 1]), bytes([0, 1]), bytes([1, 7])):
            stray.sendto(words, f"\0{name}/0")
    for on in (True, False):
        there.set(on)
        until = time.monotonic() + 20
        while heard[-1:] != [on] and time.monotonic() < until:
            time.sleep(0.01)
    assert heard == [True, False]
    begun = time.monotonic()
    for each in (here, there):
        each.close()
        assert not each._thread.is_alive()
    assert time.monotonic() - begun < 0.9  # woken, not given up


def test_a_dead_rank_ends_its_host_and_costs_others_a_deadline(run: Run) -> None:
    found = run("torch_jobs.killed", 4, 2, last_dies=True)
    assert len(found[2]["ended"]) == 4
    assert "rank 2: a bucket has not come from the other ranks of this host, [3]" in found[2]["said"]
    for rank in (0, 1):
        assert found[rank]["said"] == ""
        assert len(found[rank]["ended"]) == 16
        assert len(set(found[rank]["ended"])) <= 2, found[rank]["ended"]  # deadlines pass for it in one op at most
    # numbers of hosts; rank 0's peer on that host has ended in order, and is not missed
    assert any("rank 0: the process of rank 1 has ended" in text for text in found[1]["texts"]), found[1]["texts"]
    assert found[0]["held"] == found[1]["held"]


@pytest.mark.parametrize("how", ["at once", "lost"])
def test_a_job_that_fails_ends_all_ranks_of_its_host_in_that_step(run: Run, how: str) -> None:
    found = run("node_jobs.failing", 4, how)
    assert [one["steps"] for one in found] == [8, 8, 2, 2]
    assert all(one["buckets"] > 2 for one in found)
    assert [one["said"] for one in found[:2]] == ["", ""]
    assert "rank 2: rank(s) [3] of this host cannot average any more" in found[2]["said"]
    assert "the job of rank 3 fails" in found[3]["said"]
    assert all(one["again"] and one["again"] in one["said"] for one in found[2:])
    assert found[0]["held"] == found[1]["held"]


def test_who_waits_alone_at_a_boundary_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    from tailbound.errors import TransportError
    from tailbound.torch.node_shards import HostCollectives
    from tailbound.torch.streams import Stream

    def nobody(*_: object) -> None:
        raise RuntimeError("Timed out waiting 60000ms for recv operation to complete")

    monkeypatch.setattr(dist, "broadcast_object_list", nobody)
    here = HostCollectives(Stream(), None, None, (4, 5), 1)  # type: ignore[arg-type]
    with pytest.raises(TransportError, match=r"rank 5: .* not come .*, \[4\]: Timed out .*on ddp_model.module"):
        here.from_first(None)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([("a", 0, 2, ""), ("a", 1, 2, "")] * 2, ""),
        ([("a", 0, 2, ""), ("a", 1, 2, ""), ("b", 0, 1, "")], "rank 0 on a is one of 2 .*, and rank 2 on b .* of 1"),
        ([("a", 0, 2, ""), ("a", 1, 2, ""), ("b", 0, 2, "")], "of 3 ranks rank 0 on a is one of 2 "),
        ([("a", 0, 2, ""), ("b", 0, 2, ""), ("a", 1, 2, ""), ("b", 1, 2, "")], "rank 1 on b is LOCAL_RANK=0 of 2"),
        ([("a", 0, 2, ""), ("a", 1, 2, ""), ("b", 0, 0, "")], "rank 2 on b is LOCAL_RANK=0 of 0"),
        ([("a", 0, 0, ""), ("b", 0, 1, "")], "rank 0 on a is one of 0 with a node_group"),
        ([("a", 0, 1, ""), ("a", 0, 1, ""), ("b", 0, 0, "no switch")], "rank 2 on b has refused: no switch"),
    ],
)
def test_hosts_are_agreed_on_or_refused_by_name(said: list[tuple[str, int, int, str]], words: str) -> None:
    from tailbound.errors import ConfigError
    from tailbound.torch.node import agree

    with pytest.raises(ConfigError, match=words) if words else contextlib.nullcontext():
        agree(said)


def test_each_rank_takes_its_own_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    from tailbound.errors import ConfigError
    from tailbound.torch import node

    assert node.own_interface("eth0", "xdp") == ("eth0", "xdp")
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
        with pytest.raises(ConfigError, match="eth0,eth1: the first name is for local rank 0"):
            node.own_interface("eth0,eth1", "auto")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert node.own_interface("eth0, eth1", "xdp") == ("eth1", "xdp")
    for given, asked, found in (
        ("eth0,eth1", "auto", ("eth1", "auto")), ("eth0,eth1", "xdp", ("eth1", "xdp")), (None, "auto", (None, "udp")),
        ("eth0", "auto", ("eth0", "udp")), ("eth0", "udp", ("eth0", "udp")),
    ):  # fmt: skip
        assert node.interface_for(given, 1, 2, asked) == found
    assert node.interface_for("eth0", 0, 1, "xdp") == ("eth0", "xdp")
    for given, asked, words in (
        ("eth0", "xdp", "takes one job an interface.*2 names"),
        ("eth0,eth0", "auto", "of the 2"),
    ):
        with pytest.raises(ConfigError, match=words):
            node.interface_for(given, 0, 2, asked)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="eth0,eth1: give another one to each of the 3 ranks"):
        node.own_interface("eth0,eth1", "auto")


@pytest.mark.parametrize("places", [1, 3, 8])
@pytest.mark.parametrize("numel", [1, 16, 54_321])
def test_shards_are_of_one_size_and_hold_the_bucket(places: int, numel: int) -> None:
    from tailbound.torch.node_shards import ALIGN, cut

    size, sizes = cut(numel, places)
    assert len(sizes) == places
    assert sum(sizes) == numel
    assert size % ALIGN == 0
    assert all(part == size for part in sizes[: numel // size])
    assert size * places < numel + places * ALIGN
