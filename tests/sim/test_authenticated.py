"""A job with a key in virtual time: losses, repairs and turns of keys at once. Rules: auth-1, auth-4, auth-5."""

from __future__ import annotations

import pytest

from sim.team import SimTeam, dropped, sim_team
from support import Trouble, hasty, patient
from tailbound.wire.schema import UNKNOWN_SENDER, PacketType, Verdict
from tailbound_lab.simulate.fabric import MS
from tailbound_lab.simulate.world import EPOCH_STEPS

WIDTH, RANKS = 64, 3
NUMEL = 8 * 64 * WIDTH
LOSING = patient(width=WIDTH, ring_mib=1.0, quiet=5 * MS)


def forged(job: SimTeam) -> list[int]:
    """Packets that each rank took for forged."""
    return [int(each.job.records.verdicts()[:, Verdict.FORGED].sum()) for each in job.communicators]


def test_losses_are_repaired_across_epochs_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailbound.transport.keys.NEAR", EPOCH_STEPS // 2)
    found: list[list[bytes]] = []
    for key_file in ("drawn", ""):
        with sim_team(RANKS, LOSING | {"key_file": key_file}) as job:
            troubles = job.trouble(lambda: Trouble(seed=4, loss=0.02))
            found.append([job.right(NUMEL, op)[0][0].tobytes() for op in range(4 * EPOCH_STEPS)])
            assert sum(dropped(troubles, kind) for kind in PacketType) > 100
            assert forged(job) == [0] * RANKS
            turns = [each.job.keys.turns for each in job.communicators if each.job.keys]
            assert turns == [1] * RANKS * bool(key_file)
    assert found[0] == found[1]


def test_keys_that_are_tried_too_often_give_way_on_all_ranks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that sees the tries need not be the one that proposes maps; losses go on meanwhile. Rule: auth-8."""
    monkeypatch.setattr("tailbound_lab.simulate.world.EPOCH_STEPS", 4096)
    monkeypatch.setattr("tailbound.transport.keys.MOST", 20)
    seen_by = 2
    with sim_team(RANKS, LOSING | {"key_file": "drawn", "first_step": 1000}) as job:
        job.trouble(lambda: Trouble(seed=4, loss=0.02))

        def turns() -> set[int]:
            """Of all ranks' keys after a while."""
            job.go(25 * MS)
            return {each.job.keys.turns for each in job.communicators if each.job.keys}

        def forge() -> None:
            """As if so many packets with a wrong tag had come to one rank."""
            node = job[seen_by].node
            node.datapath.store.ledger["verdict"][UNKNOWN_SENDER, Verdict.FORGED] += 21
            node.datapath.taken += 21

        for op in range(10):
            job.right(NUMEL, op)
            assert turns() == {0}
        forge()
        for op in range(200):  # while a map begins rows may be lost that a rank places by the one before (clock-22)
            job.averaged(NUMEL, op)
            if turns() == {1}:
                break
        forge()
        for op in range(20):  # another one is not asked for so soon
            job.right(NUMEL, op)
            assert turns() == {1}
        assert {each.job.counters["keys_turned"] for each in job.communicators} == {1}
        assert forged(job) == [42 * (rank == seen_by) for rank in range(RANKS)], "at the turn nothing was refused"


def test_a_rank_that_slept_through_a_turn_of_keys_goes_on_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key to come is always in force, but for a while in which no rank proposes one. Rule: auth-4."""
    monkeypatch.setattr("tailbound.transport.keys.NEAR", 4)
    monkeypatch.setattr("tailbound_lab.simulate.world.EPOCH_STEPS", 30)
    monkeypatch.setattr("tailbound.collective.maps.EPOCH_STEPS", 16)  # suspects hold up turns for half as many
    with sim_team(4, hasty(width=WIDTH, ring_mib=4.0, key_file="drawn")) as job:

        def turns() -> list[int]:
            return [each.job.keys.turns for each in job.communicators if each.job.keys]

        for op in range(25):
            job.averaged(NUMEL, op)
        job.world.stop(2, 700 * MS)
        for op in range(30):
            job.averaged(NUMEL, op, ranks=[0, 1, 3])
        job.go(1000 * MS)
        assert (turns(), job[2].behind, forged(job)[2]) == ([1, 1, 0, 1], 29, 0)
        for op in range(30):
            job.averaged(NUMEL, op, ranks=[2])
        for op in range(30):
            job.averaged(NUMEL, op)
        job.right(NUMEL)
        assert len({*turns()}) == 1
        assert not any(each.job.membership.suspects for each in job.communicators)
