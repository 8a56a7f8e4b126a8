"""Clusters out of network namespaces: ``Cluster(LabSpec(...))``, and ``tailbound lab`` on the command line.

Only ``spec`` and ``topology`` are imported here; the rest needs pyroute2 and is imported where it is used.
"""

from __future__ import annotations

from tailbound_lab.lab.spec import Background, Burst, LabSpec, Straggler
from tailbound_lab.lab.topology import Link, Topology, Worker

__all__ = ["Background", "Burst", "LabSpec", "Link", "Straggler", "Topology", "Worker"]
