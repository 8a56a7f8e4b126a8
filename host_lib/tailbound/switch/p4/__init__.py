"""Control plane of the P4 switch: compile it, run it in bmv2, install forwarding and jobs, read its counters.

``p4c-bm2-ss`` and ``simple_switch`` are in no package registry; nothing here needs them before it is called.
"""
