"""Which network interface is nearest to a GPU on the PCI bus.

Linux has the bus as folders: a device lies in that of the bridge that it is behind. What crosses fewer bridges, and no
link between processors, disturbs less (as ``nvidia-smi topo -m`` shows it).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tailbound.errors import ConfigError

_ETHERNET = "1"
#: Folders of the bus: its root, and whatever has an address on it.
_ON_BUS = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")


@dataclass(frozen=True)
class Place:
    """Where a device is.

    Attributes:
        bridges: from the root of the bus to the device itself.
        node: of memory that the root belongs to; -1: not known.
    """

    bridges: tuple[str, ...]
    node: int = -1

    def distance(self, other: Place) -> tuple[int, int]:
        """To be compared: 0 below one root, 1 on one NUMA node, 2 elsewhere; then steps from device to device."""
        common = 0
        for one, two in zip(self.bridges, other.bridges, strict=False):
            if one != two:
                break
            common += 1
        steps = len(self.bridges) + len(other.bridges) - 2 * common
        if common:
            return 0, steps
        return (1 if self.node == other.node >= 0 else 2), steps


def nearest(gpus: Sequence[Place], interfaces: Mapping[str, Place]) -> list[str]:
    """An interface for each GPU: of the nearest ones that which fewest GPUs before it have, then the first by name."""
    users: Counter[str] = Counter()
    chosen = []
    for gpu in gpus:
        name = min(interfaces, key=lambda name: (gpu.distance(interfaces[name]), users[name], name))
        users[name] += 1
        chosen.append(name)
    return chosen


def by_gpu(places: int, sysfs: Path = Path("/sys")) -> list[str]:
    """The interface nearest to the GPU of each of a host's ranks; that at place k uses device k, as with torchrun.

    Raises:
        ConfigError: a rank does not see as many GPUs, or there is no interface on the bus that is up.
    """
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if seen < places:
        raise ConfigError(
            f"interface=pci: {places} rank(s) on this host need as many GPUs, of which local rank k uses number k, and "
            f"this one sees {seen}: set CUDA_VISIBLE_DEVICES to all of them on every rank, or name the interfaces, "
            "interface=eth0,eth1"
        )
    interfaces = on_bus(sysfs)
    if not interfaces:
        raise ConfigError("interface=pci: no Ethernet interface that is up is on the PCI bus: name the interfaces")
    return nearest([_place(sysfs / "bus/pci/devices" / _address(number)) for number in range(places)], interfaces)


def on_bus(sysfs: Path) -> dict[str, Place]:
    """Ethernet interfaces on the bus that are up and no part of another one, by name."""
    found = {}
    for folder in sorted((sysfs / "class/net").iterdir()):
        up = _said(folder / "operstate") == "up" and _said(folder / "type") == _ETHERNET
        if up and (folder / "device").exists() and not (folder / "master").exists():
            found[folder.name] = _place(folder / "device")
    return {name: place for name, place in found.items() if place.bridges}


def _address(number: int) -> str:
    """Of GPU ``number`` on the bus, as Linux writes it."""
    gpu = torch.cuda.get_device_properties(number)
    try:
        return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"  # type: ignore[attr-defined]
    except AttributeError as error:
        raise ConfigError(
            "interface=pci: this PyTorch does not say where a GPU is: take a newer one, or name the interfaces"
        ) from error


def _place(device: Path) -> Place:
    folder = device.resolve()
    node = _said(folder / "numa_node") or _said(folder.parent / "numa_node") or "-1"  # virtio is one folder deeper
    return Place(tuple(part for part in folder.parts if _ON_BUS.fullmatch(part)), int(node))


def _said(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
