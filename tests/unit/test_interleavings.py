"""All orders of contribution, result, READY, seal, window and live set, in the udp datapath as in the model.

Rules: kernel-12, kernel-14, kernel-15, kernel-16, kernel-17, kernel-19, kernel-21.
"""

from __future__ import annotations

import pytest

from interleave.scene import SCENES
from interleave.tables import EVERY_DAY, Tables, check_steps, explored
from reference_worker import ReferenceTables
from udp_world import World


@pytest.mark.parametrize("scene", SCENES)
def test_every_kind_of_transition(scene: str) -> None:
    found = explored(scene, EVERY_DAY[scene])
    assert found.whole or len(found.states) > EVERY_DAY[scene]
    check_steps(Tables(World(make=ReferenceTables)), found.kinds)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scene", SCENES)
def test_every_kind_in_many_more_states(scene: str) -> None:
    check_steps(Tables(World(make=ReferenceTables)), explored(scene, 60_000).kinds)
