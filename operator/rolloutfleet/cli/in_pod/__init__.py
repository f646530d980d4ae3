"""Scripts that are sent into pods as `python3 -c TEXT`: the standard library alone, each a file of its own."""

from pathlib import Path
from types import ModuleType


def command(script: ModuleType, *arguments: str) -> list[str]:
    """What runs a script of ours in any container that has Python."""
    return ["python3", "-I", "-S", "-c", Path(str(script.__file__)).read_text(), *arguments]
