"""Scripts of the local cluster: two that are started at once do not take each other's files."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from servers import wait_until

CLUSTER = Path(__file__).parents[2] / "cluster"
UV = """#!/bin/bash
echo "$1" >>"$ROLLOUTFLEET_CACHE/calls"
[ "$1" = venv ] && mkdir "${@: -1}" && exit
read -r _ <"$ROLLOUTFLEET_CACHE/go-on" # until the test says so
"""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    version = re.search(r"^UV=(\S+)", (CLUSTER / "common.sh").read_text(), re.MULTILINE)
    assert version is not None
    uv = tmp_path / f"uv-{version[1]}/bin/uv"
    uv.parent.mkdir(parents=True)
    uv.write_text(UV)
    uv.chmod(0o755)
    os.mkfifo(tmp_path / "go-on")
    return tmp_path


@contextmanager
def making(cache: Path, told: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An environment; what the script says goes to `told`."""
    with told.open("w") as stderr:
        process = subprocess.Popen(
            ["bash", str(CLUSTER / "environment.sh"), str(cache / "made"), "requirements.txt"],
            env={**os.environ, "ROLLOUTFLEET_CACHE": str(cache), "ROLLOUTFLEET_LOCKED": ""},
            stderr=stderr,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_of_two_that_make_the_same_one_waits_and_finds_it_made(cache: Path) -> None:
    told = cache / "told"
    with (
        making(cache, cache / "told-first") as first,
        (cache / "go-on").open("w") as go_on,  # opens when the first has come to install
        making(cache, told) as second,
    ):
        wait_until(lambda: "waiting for it" in told.read_text(), seconds=20.0, what="the second waits")
        go_on.write("\n")
        go_on.flush()
        assert (first.wait(20), second.wait(20)) == (0, 0)
    assert (cache / "calls").read_text().split() == ["venv", "pip"]


def verbs() -> list[str]:
    listed = re.search(r"^([a-z| -]+)\)$", (CLUSTER / "cluster").read_text(), re.MULTILINE)
    assert listed is not None
    return [verb for verb in listed[1].split(" | ") if verb != "status"]  # which changes nothing


@pytest.mark.parametrize("verb", verbs())
def test_whatever_changes_the_cache_or_the_cluster_takes_the_lock_first(verb: str) -> None:
    script = (CLUSTER / f"{verb}.sh").read_text()
    first, second = [line for line in script.splitlines() if line and line[0] != "#"][:2]
    assert first.endswith('/common.sh"')
    assert second == "lock"
