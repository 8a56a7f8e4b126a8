"""Every exception Tailbound raises on purpose.

::

    TailboundError
    ├── ConfigError (ValueError)        an invalid setting: rank, world size, port, MTU, option
    ├── CapabilityError (RuntimeError)  this machine lacks something: BCC, headers, privileges, kernel feature
    ├── AttachError (RuntimeError)      the interface refused the program, or somebody else's program is there
    ├── LayoutError (RuntimeError)      ranks disagree on version, layout, world size or options
    └── TransportError (RuntimeError)   the job's transport ended or cannot go on
"""

from __future__ import annotations

__all__ = ["AttachError", "CapabilityError", "ConfigError", "LayoutError", "TailboundError", "TransportError"]


class TailboundError(Exception):
    """Root of the tree; catch this to catch them all."""


class ConfigError(TailboundError, ValueError):
    """An invalid setting; the message names it and the values that are."""


class CapabilityError(TailboundError, RuntimeError):
    """The machine lacks something; the message names it and how to get it."""


class AttachError(TailboundError, RuntimeError):
    """A program could not be attached; the message names interface, mode, errno and what to try next."""


class LayoutError(TailboundError, RuntimeError):
    """Ranks disagree; the message names both ranks and what they say."""


class TransportError(TailboundError, RuntimeError):
    """The transport was closed or cannot go on; the message names rank, op and stage."""
