"""Several ranks a host under DDP, in real processes on loopback: two hosts of two ranks, against plain DDP."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("torch")


def test_gradients_are_those_of_plain_ddp(tmp_path: Path) -> None:
    import node_jobs
    from processes import Job

    with Job(node_jobs.parity, 4, tmp_path) as job:
        for found in job.results():
            assert found == [{"ranks": 2, "delivered": 1.0, "steps": 4}] * 4


def test_buckets_on_a_device_are_shared_as_those_in_host_memory_are(tmp_path: Path) -> None:
    """The job of ``test_cuda``: reduce-scatter, one order of collectives, device coder; Gloo in the place of NCCL."""
    import node_jobs
    from processes import Job

    with Job(node_jobs.as_device, 4, tmp_path) as job:
        well = {"ranks": 2, "delivered": 1.0, "on": ["cpu"]}
        assert job.results() == [[{**well, "way": "scatter"}, {**well, "way": "exchange"}]] * 4


def test_ranks_stand_for_themselves_where_nobody_says_anything_and_the_log_says_what_could_be(tmp_path: Path) -> None:
    import node_jobs
    from processes import Job

    with Job(node_jobs.alone, 4, tmp_path) as job:
        for rank, found in enumerate(job.results()):
            assert found == {"kind": ("TailboundState", 4), "said": int(rank == 0), "later": 0}


def test_join_is_refused_before_anybody_waits(tmp_path: Path) -> None:
    import node_jobs
    from processes import Job

    with Job(node_jobs.joined, 4, tmp_path) as job:
        for rank, found in enumerate(job.results()):
            assert len(found) == 2
            for text in found:
                assert text.startswith(f"rank {rank}: the ranks of a host make every forward pass together")
                assert 'node_group="off"' in text


def test_stray_datagrams_neither_hold_nor_end_the_thread() -> None:
    import os
    import socket
    import time

    from tailbound.torch.node_hold import Holds

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


def test_a_rank_that_holds_alone_leaves_what_is_due_to_the_next_forward_pass(tmp_path: Path) -> None:
    """It gave its host a slice before it held, while its neighbours sat in a barrier."""
    import node_jobs
    from processes import Job

    with Job(node_jobs.held_at_a_boundary, 4, tmp_path) as job:
        for found in job.results():
            assert found["taken"][:1] == [0]
            assert found["equal"]


def test_a_rank_that_holds_alone_holds_all_jobs_of_its_host(tmp_path: Path) -> None:
    import node_jobs
    from processes import Job

    with Job(node_jobs.holding, 4, tmp_path) as job:
        for step in job.results():
            assert step["rows_delivered"] == step["rows_expected"] > 0
            assert step["ops_late"] == 0


def test_a_host_with_nan_stays_out_of_the_mean(tmp_path: Path) -> None:
    import node_jobs
    from processes import Job

    with Job(node_jobs.abstaining, 4, tmp_path) as job:
        told = job.results()
        assert told[0] == told[1] == [False, True, False, True, False]
        assert told[2] == told[3] == [False, False, False, True, False]


@pytest.mark.parametrize("told", [True, False])
def test_all_ranks_of_a_host_have_one_loss_scale_in_every_step(tmp_path: Path, told: bool) -> None:
    """An overflow on one rank is its host's; the other host hears of it within a step. On both: nobody steps."""
    import node_jobs
    from processes import Job

    ill = [(), (1,), (), (0, 3), (), (2,), (), (), ()]
    with Job(node_jobs.scaled, 4, tmp_path, ill, told) as job:
        first, second, third, fourth = steps = job.results()
    assert [step[:3] for step in first] == [step[:3] for step in second]
    assert [step[:3] for step in third] == [step[:3] for step in fourth]
    for number, ranks in enumerate(ill):
        assert len({each[number][3] for each in steps}) == 1  # parameters and moments, of all ranks
        assert all(each[number][2] == (number != 3) for each in steps)
        assert len({each[number][1] for each in steps}) == 1 or ranks
        if ranks:  # who overflows backs off at once
            host = first if 1 in ranks else third
            assert host[number][1] == host[number][0] / 2
    assert first[-1][1] == 2.0**10 / 8


def test_sparse_gradients_are_averaged_over_all_hosts(tmp_path: Path) -> None:
    import node_jobs
    from processes import Job

    with Job(node_jobs.sparse, 4, tmp_path) as job:
        job.results()


def test_replicas_are_made_equal_within_a_host_and_across(tmp_path: Path) -> None:
    import node_jobs
    from processes import Job

    with Job(node_jobs.equal, 4, tmp_path) as job:
        for rank, found in enumerate(job.results()):
            assert found == {
                "trained, astray, synchronised": (True, True, True),
                "said": True,
                "repaired": True,
                "noticed": rank == 2,
                "replica": rank in (0, 2),
            }


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    import node_jobs
    from processes import Job

    with Job(node_jobs.refusals, 4, tmp_path) as job:
        job.results()


def test_one_host_needs_no_job(tmp_path: Path) -> None:
    import node_jobs
    from processes import Job

    with Job(node_jobs.one_host, 2, tmp_path) as job:
        assert [stats["ranks"] for stats in job.results()] == [1, 1]


def test_a_dead_rank_ends_its_host_and_costs_others_a_deadline(tmp_path: Path) -> None:
    import node_jobs
    from processes import Job

    context = multiprocessing.get_context("forkserver")
    ready, die = context.Event(), context.Event()
    with Job(node_jobs.killed, 4, tmp_path, ready, die) as job:
        job.await_event(ready, "rank 3 is in step 4")
        job.processes[3].kill()
        found = {rank: job.result(rank) for rank in range(3)}
    assert len(found[2]["ended"]) == 4
    assert "rank 2: a bucket has not come from the other ranks of this host, [3]" in found[2]["said"]
    for rank in (0, 1):
        assert found[rank]["said"] == ""
        assert len(found[rank]["ended"]) == 16
        assert len(set(found[rank]["ended"])) <= 2, found[rank]["ended"]  # deadlines pass for it in one op at most
    # numbers of hosts; rank 0's peer on that host has ended in order, and is not missed
    assert any("rank 0: the process of rank 1 has ended" in text for text in found[1]["texts"]), found[1]["texts"]
    assert found[0]["held"] == found[1]["held"]


@pytest.mark.parametrize("how", ["at once", "late", "lost"])
def test_a_job_that_fails_ends_all_ranks_of_its_host_in_that_step(tmp_path: Path, how: str) -> None:
    import node_jobs
    from processes import Job

    with Job(node_jobs.failing, 4, tmp_path, how) as job:
        found = job.results()
    assert [one["steps"] for one in found] == [8, 8, 2, 2]
    assert all(one["buckets"] > 2 for one in found)
    assert [one["said"] for one in found[:2]] == ["", ""]
    assert "rank 2: rank(s) [3] of this host cannot average any more" in found[2]["said"]
    assert "the job of rank 3 fails" in found[3]["said"]
    assert all(one["again"] and one["again"] in one["said"] for one in found[2:])
    assert found[0]["held"] == found[1]["held"]


def test_a_bucket_that_is_there_at_once_leaves_training_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    import torch
    import torch.distributed as dist

    from tailbound.torch.node_shards import HostCollectives, inside_of

    class Over:
        """A collective that was over before it was asked after."""

        def get_future(self) -> torch.futures.Future[None]:
            future: torch.futures.Future[None] = torch.futures.Future()
            future.set_result(None)
            return future

    def at_once(received: torch.Tensor, tensor: torch.Tensor, *_: object, **__: object) -> Over:
        received.copy_(tensor[:16].repeat(2))
        return Over()

    monkeypatch.setattr(dist, "all_to_all_single", at_once)
    threads, inside = [], inside_of(torch.device("cpu"))

    def training() -> None:  # a thread of its own: the number is the thread's
        torch.set_num_threads(2)
        here, tensor, done = HostCollectives(inside, None, None, (0, 1), 0), torch.ones(32), []  # type: ignore[arg-type]
        buffers = here.buffers(0, tensor)
        here.reduce(tensor, buffers, done.append)
        assert done == [None]
        threads.append(torch.get_num_threads())

    before = torch.get_num_threads()
    thread = threading.Thread(target=training)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert threads == [2]


def test_who_waits_alone_at_a_boundary_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import torch.distributed as dist

    from tailbound.errors import TransportError
    from tailbound.torch.node_shards import HostCollectives, inside_of

    def nobody(*_: object) -> None:
        raise RuntimeError("Timed out waiting 60000ms for recv operation to complete")

    monkeypatch.setattr(dist, "broadcast_object_list", nobody)
    here = HostCollectives(inside_of(torch.device("cpu")), None, None, (4, 5), 1)  # type: ignore[arg-type]
    with pytest.raises(TransportError, match=r"rank 5: .* not come .*, \[4\]: Timed out .*on ddp_model.module"):
        here.from_first(None)


def test_a_state_may_be_closed_after_the_default_group_has_ended() -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tailbound.torch.node import Node

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    group = dist.new_group([0])
    dist.destroy_process_group()
    Node(((0,),), (0,), 0).end(group)


def test_hosts_are_agreed_on_or_refused_by_name() -> None:
    from tailbound.errors import ConfigError
    from tailbound.torch.node import agreed

    both = [("a", [4, 5], "")] * 2 + [("b", [7, 9], "")] * 2
    assert agreed([4, 5, 7, 9], both) == [(4, 5), (7, 9)]
    assert agreed([0, 1, 2, 3], [("a", [0, 2], ""), ("b", [1, 3], "")] * 2) == [(0, 2), (1, 3)]
    for said, words in (
        ([("a", [0, 1])] * 2 + [("b", [2])], "a has ranks 0, 1, and b has rank 2: every host"),
        ([("a", [0, 1]), ("a", [1, 2]), ("b", [1, 2])], "rank 0 on a has ranks 0, 1 for its host, and rank 1 takes"),
        ([("a", [0, 1]), ("a", [0, 1]), ("b", [2, 3])], "and rank 3 does not train this model"),
        ([("a", [0, 1]), ("a", [0, 1]), ("b", None)], "rank 2 on b has no node_group"),
    ):
        with pytest.raises(ConfigError, match=words):
            agreed(range(len(said)), [(*one, "") for one in said])
    with pytest.raises(ConfigError, match="rank 2 on b has refused: no switch"):
        agreed(range(3), [("a", [0], ""), ("a", [1], ""), ("b", None, "no switch")])


def test_each_rank_takes_its_own_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    from tailbound.errors import ConfigError
    from tailbound.torch import interfaces

    assert interfaces.own("eth0", "xdp") == ("eth0", "xdp")
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
        with pytest.raises(ConfigError, match="eth0,eth1: the first name is for local rank 0"):
            interfaces.own("eth0,eth1", "auto")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert interfaces.own("eth0, eth1", "xdp") == ("eth1", "xdp")
    assert interfaces.interface_for("eth0,eth1", 0, 2, "auto") == ("eth0", "auto")
    assert interfaces.interface_for("eth0", 1, 2, "auto") == ("eth0", "udp")
    with pytest.raises(ConfigError, match="xdp takes one job an interface"):
        interfaces.interface_for("eth0", 1, 2, "xdp")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="eth0,eth1: give another one to each of the 3 ranks"):
        interfaces.own("eth0,eth1", "auto")


def test_a_state_opens_the_datapath_on_its_own_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """``TailboundState`` opens the one that ``own`` names."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tailbound.torch import state

    class Opened(Exception):
        pass

    def communicator(*_: object, datapath: str, interface: str, **__: object) -> None:
        raise Opened(interface, datapath)

    monkeypatch.setattr(state, "Communicator", communicator)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        with pytest.raises(Opened) as opened:
            state.TailboundState(interface="eth0,eth1", datapath="udp")
    finally:
        dist.destroy_process_group()
    assert opened.value.args == ("eth1", "udp")


@pytest.mark.parametrize("places", [1, 2, 3, 8])
@pytest.mark.parametrize("numel", [1, 15, 16, 17, 1000, 54_321])
def test_shards_are_of_one_size_and_hold_the_bucket(places: int, numel: int) -> None:
    from tailbound.torch.node_shards import ALIGN, cut

    size, sizes = cut(numel, places)
    assert len(sizes) == places
    assert sum(sizes) == numel
    assert size % ALIGN == 0
    assert all(part == size for part in sizes[: numel // size])
    assert size * places < numel + places * ALIGN


def test_what_is_ready_is_done_in_order() -> None:
    from tailbound.torch.node_shards import InOrder
    from tailbound.torch.streams import Stream

    done: list[int] = []
    raised: list[Exception] = []
    order = InOrder(Stream())

    def act(number: int) -> None:
        done.append(number)
        if number == 1:
            raise ValueError

    for number in (2, 1, 3):
        order.ready(number, lambda number=number: act(number), raised.append)
    assert done == []
    order.ready(0, lambda: act(0), raised.append)
    assert done == [0, 1, 2, 3]
    assert [type(error) for error in raised] == [ValueError]


def test_on_a_device_what_is_ready_is_done_behind_its_own_mark_and_after_the_step_is_reduced() -> None:
    from contextlib import contextmanager
    from typing import Any

    from tailbound.torch.node_shards import InOrder

    seen: list[Any] = []
    marks = iter("abcd")

    class Noted:
        """Says behind which mark work is queued; the mark of the fourth fails."""

        def mark(self) -> str:
            if (found := next(marks)) == "d":
                raise RuntimeError("the device is gone")
            return found

        @contextmanager
        def use(self, mark: Any = None) -> Any:
            seen.append(mark)
            yield
            seen.append("over")

    order = InOrder(Noted(), 0)  # type: ignore[arg-type]
    for number in (1, 0, 2, 3):
        order.ready(number, lambda number=number: seen.append(number), lambda error: seen.append(str(error)))
    assert seen == []
    order.allow(2)
    assert seen == ["b", 0, "over", "a", 1, "over"]
    del seen[:]
    order.allow(4)
    assert seen == ["c", 2, "over", None, "the device is gone"]
