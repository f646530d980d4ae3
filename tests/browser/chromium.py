"""A headless Chromium, driven by its DevTools protocol: a websocket with a JSON object a command."""

from __future__ import annotations

import base64
import itertools
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import websocket

BINARY = "/usr/bin/chromium-headless-shell"
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),  # tests run as root, and in containers
    *("--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--hide-scrollbars", "--force-color-profile=srgb"),
)
START_SECONDS = 60.0
END_SECONDS = 10.0
CALL_SECONDS = 30.0
WAIT_SECONDS = 30.0


class Tab:
    """One page. `problems`: what its console and its content security policy complained of."""

    def __init__(self, url: str) -> None:
        self._connection = websocket.create_connection(url, timeout=CALL_SECONDS, suppress_origin=True)
        self._numbers = itertools.count(1)
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._loaded = 0
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._connection.close(timeout=1)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv())
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return dict(message["result"])
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params") or {}
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(str(parameters["exceptionDetails"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.problems.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
            case "Page.loadEventFired":
                self._loaded += 1
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])

    def open(self, url: str) -> None:
        before = self._loaded
        self.call("Page.navigate", url=url)
        while self._loaded == before:
            self._note(json.loads(self._connection.recv()))

    def run(self, script: str) -> Any:
        """The value of an expression, as JSON."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, f"{script}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def wait(self, script: str, *, seconds: float = WAIT_SECONDS) -> Any:
        """Until the expression is truthy."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(script)):
            if time.monotonic() > deadline:
                shown = self.run("document.body.innerText")[:2000]
                raise AssertionError(f"still {value!r}: {script}\n{shown}")
            time.sleep(0.05)
        return value

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def texts(self, selector: str) -> list[str]:
        return list(self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((node) => node.innerText)"))

    def colour(self, selector: str) -> str:
        return str(self.run(f"getComputedStyle(document.querySelector({json.dumps(selector)})).backgroundColor"))

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def scheme(self, name: str) -> None:
        """light or dark"""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """`folder`: for its profile; empty."""
    command = [BINARY, *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    with (folder / "log").open("wb") as log:
        # A session of its own: the binary is Debian's script around the real one, which does not end with it.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        port = _port(folder / "DevToolsActivePort", process, folder / "log")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=CALL_SECONDS) as answer:
            pages = [target for target in json.load(answer) if target["type"] == "page"]
        tab = Tab(pages[0]["webSocketDebuggerUrl"])
        try:
            yield tab
        finally:
            tab.close()
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """All processes of its session."""
    deadline = time.monotonic() + END_SECONDS
    number = signal.SIGTERM
    while True:
        process.poll()
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        assert time.monotonic() < deadline + END_SECONDS, f"{BINARY} does not end"
        number = signal.SIGKILL if time.monotonic() > deadline else signal.SIGTERM
        time.sleep(0.05)


def _port(said: Path, process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if said.exists() and (lines := said.read_text().splitlines()):
            return int(lines[0])
        assert process.poll() is None, f"{BINARY} ended: {log.read_text()[-2000:]}"
        time.sleep(0.05)
    raise AssertionError(f"{BINARY} opened no port in {START_SECONDS:g} s: {log.read_text()[-2000:]}")
