"""Gives the functions of a loaded module the code of another version of it, wherever they have been imported to."""

from __future__ import annotations

from functools import _lru_cache_wrapper as Cached
from types import FunctionType, ModuleType


def graft(old: object, new: object) -> bool:
    """Puts what ``new`` has in place of what ``old`` has: code and defaults of functions, constants of classes.

    Args:
        old: a module, a class or a function; keeps its identity.
        new: the same from another version of the source, with the same names in it.

    Returns:
        Whether anything has changed.
    """
    if old is new:  # imported
        return False
    if isinstance(old, FunctionType) and isinstance(new, FunctionType):
        changed = (old.__code__, _defaults(old)) != (new.__code__, _defaults(new))
        for before, after in zip(old.__closure__ or (), new.__closure__ or (), strict=True):  # default factories
            if isinstance(before.cell_contents, FunctionType):
                changed |= graft(before.cell_contents, after.cell_contents)
        old.__code__, old.__defaults__, old.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__
        return changed
    if isinstance(old, Cached) and isinstance(new, Cached):
        old.cache_clear()
        return graft(old.__wrapped__, new.__wrapped__)
    if isinstance(old, property) and isinstance(new, property):
        return graft(old.fget, new.fget)
    if isinstance(old, staticmethod | classmethod) and isinstance(new, staticmethod | classmethod):
        return graft(old.__func__, new.__func__)
    if isinstance(old, type | ModuleType) and isinstance(new, type | ModuleType):
        changed = False
        for name, value in list(vars(new).items()):
            before = vars(old)[name]
            if isinstance(old, type) and isinstance(value, int) and repr(before) != repr(value):
                setattr(old, name, value)
                changed = True
            changed |= graft(before, value)
        return changed
    return False


def _defaults(function: FunctionType) -> str:
    """As a text: 0 and False are equal as values."""
    return repr((function.__defaults__, function.__kwdefaults__))
