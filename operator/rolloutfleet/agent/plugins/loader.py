"""From a name to a function: `package.module:function`, `package.module.function` as slime writes it, or the name of an
entry point in the group rolloutfleet.plugins."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import traceback
from collections.abc import Callable
from typing import Any

from rolloutfleet.agent.plugins.errors import PluginNotFound
from rolloutfleet.agent.plugins.kinds import ARGUMENTS, Kind

GROUP = "rolloutfleet.plugins"


def load(reference: str, kind: Kind) -> Callable[..., Any]:
    """Raises PluginNotFound, with the traceback where its module raised."""
    found = _found(reference)
    if inspect.isclass(found):
        found = _or_not_found(reference, found)  # with a state of its own, one a process
    if not callable(found):
        raise PluginNotFound(f"{reference}: it is a {type(found).__name__} and cannot be called")
    try:
        inspect.signature(found).bind(*[None] * ARGUMENTS[kind])
    except TypeError as error:
        raise PluginNotFound(
            f"{reference}: a {kind.value} is called with {ARGUMENTS[kind]} argument(s), it takes "
            f"{inspect.signature(found)}: {error}"
        ) from error
    except ValueError:
        pass  # no signature to be had, as of functions in C
    function: Callable[..., Any] = found
    return function


def _found(reference: str) -> Any:
    for entry in importlib.metadata.entry_points(group=GROUP, name=reference):
        return _or_not_found(reference, entry.load)
    module, _, attribute = reference.partition(":") if ":" in reference else reference.rpartition(".")
    if not module or not attribute:
        known = sorted(entry.name for entry in importlib.metadata.entry_points(group=GROUP))
        raise PluginNotFound(
            f"{reference}: package.module:function is needed, or an entry point of the group {GROUP}, which has "
            f"{', '.join(known) or 'none'}"
        )
    found = _or_not_found(reference, lambda: importlib.import_module(module))
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise PluginNotFound(f"{reference}: {getattr(found, '__name__', module)} has no {name}")
        found = getattr(found, name)
    return found


def _or_not_found(reference: str, importing: Callable[[], Any]) -> Any:
    try:
        return importing()
    except Exception as error:
        raise PluginNotFound(f"{reference}: {type(error).__name__}: {error}", traceback.format_exc()) from error
