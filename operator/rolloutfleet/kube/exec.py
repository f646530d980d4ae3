"""Run a command in a container of a pod: the websocket protocol of the API server (v5.channel.k8s.io).

Each message begins with the number of its channel. Channel 3 carries a metav1.Status once the command has ended.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import websocket

from rolloutfleet.kube.config import Credentials
from rolloutfleet.kube.errors import ApiError, Unreachable, error_from
from rolloutfleet.kube.resources import POD

_PROTOCOLS = ["v5.channel.k8s.io", "v4.channel.k8s.io"]
_STDOUT, _STDERR, _STATUS = 1, 2, 3
CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class Ended:
    exit_code: int
    stdout: str
    stderr: str


async def run_in_pod(
    credentials: Credentials, *, namespace: str, pod: str, container: str, command: Sequence[str], seconds: float
) -> Ended:
    """Wait for its end, `seconds` at most. Raises ApiError; Unreachable when the connection broke or the time is over,
    and then the command may still run."""
    query = [("container", container), ("stdout", "true"), ("stderr", "true"), *(("command", word) for word in command)]
    address = f"{credentials.server}{POD.path(namespace, pod, 'exec')}?{urlencode(query)}"
    return await asyncio.to_thread(_run, credentials, address, seconds)


def _run(credentials: Credentials, address: str, seconds: float) -> Ended:
    token = credentials.token()
    tls = credentials.tls
    deadline = time.monotonic() + seconds
    output: dict[int, bytes] = {}
    try:
        connection = websocket.create_connection(
            "ws" + address.removeprefix("http"),
            timeout=CONNECT_SECONDS,
            header=[f"Authorization: Bearer {token}"] if token else [],
            subprotocols=_PROTOCOLS,
            suppress_origin=True,
            redirect_limit=0,
            http_no_proxy=["*"],
            sslopt={"context": tls, "cert_reqs": tls.verify_mode, "check_hostname": tls.check_hostname},
        )
        try:
            while _STATUS not in output:
                connection.settimeout(max(deadline - time.monotonic(), 0.001))
                message = connection.recv()
                data = message.encode() if isinstance(message, str) else message
                if data:
                    output[data[0]] = output.get(data[0], b"") + data[1:]
        finally:
            connection.close(timeout=1)
    except websocket.WebSocketBadStatusException as error:
        body = error.resp_body
        text = body.decode(errors="replace") if isinstance(body, bytes) else str(body or "")
        raise error_from(error.status_code, _parsed(text), text) from error
    except (websocket.WebSocketException, OSError) as error:
        raise Unreachable(f"exec {address.partition('?')[0]}: {type(error).__name__} {error}") from error
    return Ended(_exit_code(output[_STATUS]), _text(output, _STDOUT), _text(output, _STDERR))


def _exit_code(status: bytes) -> int:
    """0 of a Success; raises ApiError when the command could not be started."""
    body = _parsed(status.decode(errors="replace"))
    if isinstance(body, dict) and body.get("status") == "Success":
        return 0
    for cause in ((body or {}).get("details") or {}).get("causes") or []:
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    raise ApiError(str((body or {}).get("message") or status[:300]), reason=str((body or {}).get("reason") or ""))


def _text(output: dict[int, bytes], channel: int) -> str:
    return output.get(channel, b"").decode(errors="replace")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
