"""Runs in an engine's pod in place of SGLang: where no model of the needed kind runs on a CPU (encoders and the
language engines beside them), and where a test needs more engines, or more lives of them, than two cores can run. It is
handed SGLang's arguments and speaks the part of SGLang's HTTP API that the operator, the router and the agent use.

What it answers with depends on its weights alone: `expected_tokens` says so to a test that knows the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

REQUEST_SECONDS = 0.3
UPDATE_SECONDS = 0.1
VOCABULARY = 512


def expected_tokens(weights: str, prompt: Sequence[int], count: int) -> list[int]:
    """`weights`: see `weights_in`. Of a model that is not mounted the last character of its path, so that models are
    told apart."""
    if "/" in weights:
        return [ord(weights[-1])] * count
    seeds = (f"{weights}/{list(prompt)}/{position}" for position in range(count))
    return [int(hashlib.sha256(seed.encode()).hexdigest()[:8], 16) % VOCABULARY for seed in seeds]


def weights_in(path: str) -> str:
    """A digest of the checkpoint; the path itself where there is none."""
    files = sorted(Path(path).glob("*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() if files else path


class Engine:
    """State of the one engine of this process."""

    def __init__(self, path: str, label: str) -> None:
        self.path, self.label, self.weights = path, label, weights_in(path)
        self.changed = threading.Condition()
        self.paused = False
        self.running: dict[str, bool] = {}
        """By id: whether it is to be aborted."""
        self.asked = 0
        """Generations of clients: the operator's own looks are none."""

    def generate(self, prompt: Sequence[int], count: int, rid: str = "") -> dict[str, Any]:
        """One token after the other, each by the weights of its moment; none while paused."""
        tokens: list[int] = []
        labels: list[str] = []
        with self.changed:
            rid = rid or str(uuid4())
            self.running[rid] = False
            while len(tokens) < count and not self.running[rid]:
                self.changed.wait(REQUEST_SECONDS / count)
                if not self.paused:
                    tokens.append(expected_tokens(self.weights, prompt, len(tokens) + 1)[-1])
                    labels.append(self.label)
            del self.running[rid]
            self.changed.notify_all()
            label = self.label
        finish = {"type": "length"} if len(tokens) == count else {"type": "abort", "message": "aborted"}
        meta = {
            "finish_reason": finish,
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "completion_tokens": len(tokens),
            "weight_version": label,
        }
        return {"text": "", "meta_info": meta | ({"weight_versions": spans(labels)} if labels else {})}

    def load(self, path: str, label: str) -> str:
        """Why it could not; empty when it did."""
        time.sleep(UPDATE_SECONDS)
        weights = weights_in(path)
        if weights == path:
            return f"{path}: no checkpoint"
        with self.changed:
            self.path, self.label, self.weights = path, label, weights
        return ""

    def pause(self, mode: str) -> None:
        with self.changed:
            self.paused = True
            if mode == "abort":
                self.abort()

    def resume(self) -> None:
        with self.changed:
            self.paused = False
            self.changed.notify_all()

    def abort(self, rid: str = "") -> None:
        """What runs ends with what it has, and has ended when this returns. Of an id: that one and all whose id begins
        so; nothing where it is not known, as in SGLang."""
        with self.changed:
            if rid and rid not in self.running:
                return
            aborted = {known for known in self.running if known.startswith(rid)}
            self.running |= dict.fromkeys(aborted, True)
            self.changed.notify_all()
            self.changed.wait_for(lambda: not aborted & self.running.keys(), timeout=5.0)


def spans(labels: Sequence[str]) -> list[dict[str, Any]]:
    """Which weights made which tokens, in SGLang's words."""
    found: list[dict[str, Any]] = []
    for position, label in enumerate(labels):
        if found and found[-1]["version"] == label:
            found[-1]["end"] = position + 1
        else:
            found.append({"version": label, "start": position, "end": position + 1})
    return found


class Handler(BaseHTTPRequestHandler):
    def answer(self, body: Any, status: int = 200) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def sent(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        return body

    def log_message(self, *_: Any) -> None:
        pass


class LanguageServer(Handler):
    engine: Engine

    def do_GET(self) -> None:
        path, engine = self.path.partition("?")[0], self.engine
        if path in ("/health", "/ping"):
            self.answer({})
        elif path == "/ready":
            self.answer({}, 503 if engine.paused else 200)
        elif path == "/health_generate":
            made = engine.generate([1], 1)
            self.answer({}, 200 if made["meta_info"]["completion_tokens"] else 503)
        elif path == "/model_info":
            self.answer({"model_path": engine.path, "weight_version": engine.label})
        elif path == "/server_info":
            self.answer({"disaggregation_mode": "null", "tp_size": 1, "pp_size": 1, "version": "stand-in"})
        elif path == "/v1/loads":
            self.answer({"loads": [{"num_running_reqs": len(engine.running), "num_waiting_reqs": 0}]})
        elif path == "/requests":  # not SGLang's: for tests that count
            self.answer({"count": engine.asked})
        else:
            self.answer({"error": path}, 404)

    def do_POST(self) -> None:
        path, body, engine = self.path.partition("?")[0], self.sent(), self.engine
        if path == "/generate":
            count = body["sampling_params"]["max_new_tokens"]
            with engine.changed:
                engine.asked += 1
            self.answer(engine.generate(body.get("input_ids") or [], count, body.get("rid") or ""))
        elif path == "/weights_checker":
            self.answer({"success": True, "per_engine_checksum": f"of-{engine.weights}"})
        elif path == "/update_weights_from_disk":
            problem = engine.load(body["model_path"], body["weight_version"])
            self.answer({"success": not problem, "message": problem}, 400 if problem else 200)
        elif path == "/update_weight_version":
            engine.label = body["new_version"]
            self.answer({"success": True})
        elif path == "/pause_generation":
            engine.pause(body["mode"])
            self.answer({})
        elif path == "/continue_generation":
            engine.resume()
            self.answer({})
        elif path == "/abort_request":
            engine.abort("" if body.get("abort_all") else body["rid"])
            self.answer({})
        elif path == "/flush_cache":
            self.answer({})
        else:
            self.answer({"error": path}, 404)


class EncoderServer(Handler):
    def do_GET(self) -> None:
        self.answer({}, 200 if self.path.partition("?")[0] == "/health" else 404)

    def do_POST(self) -> None:
        self.answer({"error": self.path}, 404)


class Table(Handler):
    urls: list[str] = []

    def do_GET(self) -> None:
        self.answer({"encoder_urls": self.urls})

    def do_POST(self) -> None:
        url = self.sent()["url"]
        if url not in self.urls:
            self.urls.append(url)
        self.answer("OK")

    def do_DELETE(self) -> None:
        url = self.sent()["url"]
        if url in self.urls:
            self.urls.remove(url)
        self.answer("OK")


class Server(ThreadingHTTPServer):
    request_queue_size = 128


def main(flags: Sequence[str]) -> None:
    def value(flag: str) -> str:
        return flags[flags.index(flag) + 1]

    time.sleep(float(os.environ.get("STAND_IN_LOAD_SECONDS", "0")))
    if "--language-only" in flags:
        table = Server(("", int(value("--encoder-bootstrap-port"))), Table)
        threading.Thread(target=table.serve_forever, daemon=True).start()
    handler: type[Handler] = EncoderServer
    if "--encoder-only" not in flags:
        LanguageServer.engine = Engine(value("--model-path"), value("--weight-version"))
        handler = LanguageServer
    Server(("", int(value("--port"))), handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
