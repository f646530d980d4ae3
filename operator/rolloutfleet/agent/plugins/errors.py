"""
PluginError
├── PluginNotFound   the reference leads to nothing that can be called so
├── PluginRaised     its code raised; `details` has the traceback
├── PluginTimeout    it took longer than it may
├── PluginDied       its process ended, or was ended because it answered nothing
└── WrongAnswer      it returned something else than its kind returns
"""

from __future__ import annotations


class PluginError(Exception):
    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message, details)
        self.message, self.details = message, details

    def __str__(self) -> str:
        return self.message


class PluginNotFound(PluginError):
    pass


class PluginRaised(PluginError):
    pass


class PluginTimeout(PluginError):
    pass


class PluginDied(PluginError):
    pass


class WrongAnswer(PluginError):
    pass
