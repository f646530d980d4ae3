"""A real PostgreSQL server of the test run's own, on a socket in a temporary folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

START_SECONDS = 60.0


def binaries() -> Path:
    """Debian keeps them off the PATH, since several versions may be there."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not found:
        raise FileNotFoundError("/usr/lib/postgresql/*/bin/postgres: `make tools` installs PostgreSQL")
    return found[-1].parent


@contextmanager
def server() -> Iterator[str]:
    """Its conninfo. PostgreSQL refuses to run as root: as root it runs as Debian's user for it."""
    user = "postgres" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="rf-postgres-", dir="/tmp"))  # a socket's path has 107 characters at most
    try:
        if user:
            shutil.chown(folder, user)
        data = folder / "data"
        make = [
            str(binaries() / "initdb"),
            "--no-sync",
            "-A",
            "trust",
            "-U",
            "tests",
            "-E",
            "UTF8",
            "--locale=C",
            str(data),
        ]
        subprocess.run(make, user=user, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        # What survives a crash of the machine is not what is tested here: without fsync tests take half the time.
        options = ["-c", "listen_addresses=", "-c", "fsync=off", "-c", "max_connections=200"]
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen(
                [binaries() / "postgres", "-D", data, "-k", folder, *options], user=user, cwd=folder, stderr=log
            )
        try:
            conninfo = f"host={folder} user=tests dbname=postgres"
            _await(conninfo, process, folder / "log")
            yield conninfo
        finally:
            process.terminate()  # smart shutdown would wait for connections
            try:
                process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                process.send_signal(2)
                process.wait(timeout=30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def address(conninfo: str) -> str:
    """As agents are told of it."""
    fields = dict(part.split("=") for part in conninfo.split())
    return f"postgresql://{fields['user']}@/{fields['dbname']}?host={fields['host']}"


def _await(conninfo: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            psycopg.connect(conninfo, connect_timeout=5).close()
            return
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"PostgreSQL did not start:\n{log.read_text()}") from None
            time.sleep(0.05)
