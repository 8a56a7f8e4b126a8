"""Which network interface a rank takes where several ranks share a host."""

from __future__ import annotations

import logging
import os

from tailbound.errors import ConfigError

log = logging.getLogger("tailbound")


def local_place(what: str, otherwise: str) -> tuple[int, int]:
    """This rank's place on its host and the number of ranks there, as torchrun says them.

    Args:
        what: asks for that.
        otherwise: what a user can do who has no torchrun.

    Raises:
        ConfigError: no rank says them.
    """
    try:
        return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{what} goes by LOCAL_RANK and LOCAL_WORLD_SIZE, and they are not set: start with torchrun, set both, or "
            f"{otherwise}"
        ) from error


def own(given: str | None, datapath: str) -> tuple[str | None, str]:
    """Interface and datapath of this rank; of several names with commas between them, the one at LOCAL_RANK.

    Raises:
        ConfigError: too few names, or nothing tells which of them is this rank's.
    """
    if given is None or "," not in given:
        return given, datapath
    what = f"interface={given}: the first name is for local rank 0, and so on; this"
    place, places = local_place(what, "give each rank the name of its own interface")
    return interface_for(given, place, places, datapath)


def interface_for(given: str | None, place: int, places: int, datapath: str) -> tuple[str | None, str]:
    """Interface and datapath of the rank at ``place``, of ``places`` ranks on a host with a job each.

    Args:
        given: one interface for all, one for each with commas between them, or None.
        place: of this rank on its host.
        places: ranks on the host.
        datapath: the one that was asked for.

    Raises:
        ConfigError: too few interfaces, or ranks share one that takes one job only.
    """
    names = [name.strip() for name in (given or "").split(",")]
    if len(names) > 1:
        if len(names) < places or len(set(names)) < len(names):
            raise ConfigError(f"interface={given}: give another one to each of the {places} ranks on a host")
        return names[place], datapath
    if places == 1 or datapath == "udp":
        return given, datapath
    if datapath != "auto":
        raise ConfigError(
            f"{places} ranks on a host are as many jobs, and {datapath} takes one job an interface: pass interface= "
            f"with {places} names, or datapath='udp'"
        )
    log.info("several ranks share %s: udp, since xdp takes one job an interface", given or "an interface")
    return given, "udp"
