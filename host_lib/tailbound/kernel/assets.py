"""Where the C sources are: beside the package in a checkout (symbolic links), inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

from tailbound.errors import CapabilityError


def assets(part: str) -> Path:
    """Folder of sources: ``core``, ``ebpf``, ``xdp_programs`` or ``p4``.

    Raises:
        CapabilityError: the installation lacks it.
    """
    path = Path(__file__).resolve().parent.parent / "_assets" / part
    if not path.is_dir():
        raise CapabilityError(f"the sources in {path} are missing: reinstall tailbound from a whole wheel or checkout")
    return path.resolve()
