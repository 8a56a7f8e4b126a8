"""The interface that is nearest to a GPU, over a made-up PCI bus."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.needs("torch")

#: Two processors with a root each. Below the first one: a switch with two GPUs and two interfaces; below the second
#: one: a switch with two GPUs and an interface, and an interface at a port of the root itself.
ROOTS = {"pci0000:00": 0, "pci0000:80": 1}
GPUS = [
    "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0",
    "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0",
    "pci0000:80/0000:80:01.0/0000:81:00.0/0000:82:00.0/0000:83:00.0",
    "pci0000:80/0000:80:01.0/0000:81:00.0/0000:82:01.0/0000:84:00.0",
]
INTERFACES = {
    "eth1": "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:02.0/0000:05:00.0",
    "eth0": "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:03.0/0000:06:00.0",
    "eth2": "pci0000:80/0000:80:01.0/0000:81:00.0/0000:82:02.0/0000:85:00.0",
    "eth3": "pci0000:80/0000:80:02.0/0000:88:00.0",
}


def bus(
    monkeypatch: pytest.MonkeyPatch, sysfs: Path, interfaces: dict[str, str], gpus: list[str] = GPUS, nodes: bool = True
) -> Path:
    """``sysfs`` as Linux shows such a machine, and the GPUs as torch does."""
    from tailbound.torch import pci

    (sysfs / "class/net").mkdir(parents=True)
    (sysfs / "bus/pci/devices").mkdir(parents=True)
    for device in (*gpus, *interfaces.values()):
        folder = sysfs / "devices" / device
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{ROOTS[device.split('/')[0]] if nodes else -1}\n")
    for device in gpus:
        (sysfs / "bus/pci/devices" / device.split("/")[-1]).symlink_to(sysfs / "devices" / device)
    for name, device in interfaces.items():
        interface(sysfs, name, sysfs / "devices" / device)
    where = [[int(part, 16) for part in gpu.split("/")[-1].removesuffix(".0").split(":")] for gpu in gpus]
    seen = [SimpleNamespace(pci_domain_id=a, pci_bus_id=b, pci_device_id=c) for a, b, c in where]
    cuda = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: len(seen), get_device_properties=seen.__getitem__
    )
    monkeypatch.setattr(pci, "torch", SimpleNamespace(cuda=cuda))
    return sysfs


def interface(sysfs: Path, name: str, device: Path | None, state: str = "up", kind: str = "1") -> Path:
    folder = sysfs / "class/net" / name
    folder.mkdir()
    (folder / "operstate").write_text(f"{state}\n")
    (folder / "type").write_text(f"{kind}\n")
    if device is not None:
        (folder / "device").symlink_to(device)
    return folder


def test_each_gpu_gets_the_interface_with_the_fewest_bridges_between(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of two that are equally near each is taken once; a near one is shared before a far one is taken."""
    from tailbound.torch import pci

    sysfs = bus(monkeypatch, tmp_path, INTERFACES)
    assert pci.by_gpu(4, sysfs) == ["eth0", "eth1", "eth2", "eth2"]
    assert pci.by_gpu(1, sysfs) == ["eth0"]


@pytest.mark.parametrize(("nodes", "wanted"), [(True, "eth9"), (False, "eth0")])
def test_another_root_is_nearer_on_the_same_processor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: bool, wanted: str
) -> None:
    """Where the machine says which is which; else the first name."""
    from tailbound.torch import pci

    monkeypatch.setitem(ROOTS, "pci0000:40", 1)
    # as many steps from the GPU, so that the node alone decides
    twin = "pci0000:40/0000:40:01.0/0000:41:00.0/0000:42:00.0/0000:43:00.0"
    others = {"eth0": INTERFACES["eth0"], "eth9": twin}
    assert pci.by_gpu(1, bus(monkeypatch, tmp_path, others, GPUS[2:], nodes=nodes)) == [wanted]


def test_what_is_no_interface_of_its_own_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is down, InfiniBand, part of a bond, or on no bus; a virtio interface lies a folder deeper."""
    from tailbound.torch import pci

    sysfs = bus(monkeypatch, tmp_path, {"eth3": INTERFACES["eth3"]})
    near = sysfs / "devices" / GPUS[0]
    interface(sysfs, "down0", near, state="down")
    interface(sysfs, "ib0", near, kind="32")
    (interface(sysfs, "port0", near) / "master").symlink_to(tmp_path)
    interface(sysfs, "bond0", None)
    (near / "virtio2").mkdir()
    (sysfs / "platform").mkdir()
    interface(sysfs, "soc0", sysfs / "platform")
    assert list(pci.on_bus(sysfs)) == ["eth3"]
    interface(sysfs, "eth5", near / "virtio2")
    assert pci.on_bus(sysfs)["eth5"] == pci.Place(tuple(GPUS[0].split("/")), 0)


def test_ranks_take_them_by_their_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Who shares an interface takes udp, as where one is named for all."""
    from tailbound.errors import ConfigError
    from tailbound.torch import interfaces, pci

    sysfs = bus(monkeypatch, tmp_path, INTERFACES)
    by_gpu = pci.by_gpu
    monkeypatch.setattr(pci, "by_gpu", lambda places: by_gpu(places, sysfs))
    assert interfaces.interface_for("pci", 1, 4, "xdp") == ("eth1", "xdp")
    assert interfaces.interface_for("pci", 3, 4, "auto") == ("eth2", "udp")
    with pytest.raises(ConfigError, match="xdp takes one job an interface"):
        interfaces.interface_for("pci", 3, 4, "xdp")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert interfaces.own("pci", "xdp") == ("eth1", "xdp")
    assert interfaces.own("eth7, eth8", "xdp") == ("eth8", "xdp")
    assert interfaces.own("eth7", "xdp") == ("eth7", "xdp")
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ConfigError, match="interface=pci goes by LOCAL_RANK"):
        interfaces.own("pci", "auto")


def test_a_job_takes_udp_where_its_ranks_share_an_interface(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``TailboundState`` opens the datapath that ``own`` says."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tailbound.torch import pci, state

    class Opened(Exception):
        pass

    def communicator(*_: object, datapath: str, interface: str, **__: object) -> None:
        raise Opened(interface, datapath)

    sysfs = bus(monkeypatch, tmp_path, INTERFACES)
    by_gpu = pci.by_gpu
    monkeypatch.setattr(pci, "by_gpu", lambda places: by_gpu(places, sysfs))
    monkeypatch.setattr(state, "Communicator", communicator)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        with pytest.raises(Opened) as opened:
            state.TailboundState(interface="pci")
    finally:
        dist.destroy_process_group()
    assert opened.value.args == ("eth2", "udp")


def test_what_cannot_be_told_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tailbound.errors import ConfigError
    from tailbound.torch import pci

    sysfs = bus(monkeypatch, tmp_path, {})
    with pytest.raises(ConfigError, match="no Ethernet interface that is up"):
        pci.by_gpu(4, sysfs)
    with pytest.raises(ConfigError, match=r"need as many GPUs.* sees 4"):
        pci.by_gpu(5, sysfs)
    interface(sysfs, "eth0", sysfs / "devices" / GPUS[0])
    monkeypatch.setattr(pci.torch.cuda, "get_device_properties", lambda number: object())
    with pytest.raises(ConfigError, match="take a newer one"):
        pci.by_gpu(4, sysfs)
