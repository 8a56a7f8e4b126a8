"""``tailbound doctor``: what this machine can do, which datapath it gets, why, and how to get the better one."""

from __future__ import annotations

from tailbound.doctor.report import Report, examine, show

__all__ = ["Report", "examine", "show"]
