"""A Linux box as a switch that sums: its ports, its jobs, and what it says of them.

``box`` runs one, ``job`` decides which jobs may share it (no I/O), ``pinned`` keeps it alive without a process,
``report`` looks at it.
"""
