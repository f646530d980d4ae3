"""Runs in an engine's pod in place of SGLang: where no model of the needed kind runs on a CPU (encoders and the
language engines beside them), and where a test needs more engines than two cores can run. It is handed SGLang's
arguments and speaks the part of SGLang's HTTP API that the operator, the router and the agent use.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FLAGS = sys.argv[1:]
ENCODER = "--encoder-only" in FLAGS
TOKEN = ord(FLAGS[FLAGS.index("--model-path") + 1][-1])
"""What it answers with: the last character of its model's path, so that models are told apart."""
ENCODERS: list[str] = []
SERVED: list[str] = []


def value(flag: str) -> str:
    return FLAGS[FLAGS.index(flag) + 1]


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


class Engine(Handler):
    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/health" or (path in ("/ping", "/ready", "/health_generate") and not ENCODER):
            self.answer({})
        elif path == "/model_info" and not ENCODER:
            self.answer({"model_path": value("--model-path"), "weight_version": value("--weight-version")})
        elif path == "/server_info" and not ENCODER:
            self.answer({"disaggregation_mode": "null", "tp_size": 1, "pp_size": 1, "version": "stand-in"})
        elif path == "/v1/loads" and not ENCODER:
            self.answer({"loads": []})
        elif path == "/requests":  # not SGLang's: for tests that count
            self.answer({"count": len(SERVED)})
        else:
            self.answer({"error": path}, 404)

    def do_POST(self) -> None:
        body = self.sent()
        if self.path == "/generate" and not ENCODER:
            SERVED.append(body["rid"])
            time.sleep(0.3)
            tokens = body["sampling_params"]["max_new_tokens"]
            meta = {
                "finish_reason": {"type": "length"},
                "output_token_logprobs": [[-0.5, TOKEN, None]] * tokens,
                "completion_tokens": tokens,
                "weight_version": value("--weight-version"),
            }
            self.answer({"text": "", "meta_info": meta})
        elif self.path == "/weights_checker" and not ENCODER:
            self.answer({"success": True, "per_engine_checksum": "of-" + value("--model-path")})
        else:
            self.answer({"error": self.path}, 404)


class Table(Handler):
    def do_GET(self) -> None:
        self.answer({"encoder_urls": ENCODERS})

    def do_POST(self) -> None:
        url = self.sent()["url"]
        if url not in ENCODERS:
            ENCODERS.append(url)
        self.answer("OK")

    def do_DELETE(self) -> None:
        url = self.sent()["url"]
        if url in ENCODERS:
            ENCODERS.remove(url)
        self.answer("OK")


if "--language-only" in FLAGS:
    port = int(value("--encoder-bootstrap-port"))
    threading.Thread(target=ThreadingHTTPServer(("", port), Table).serve_forever, daemon=True).start()
ThreadingHTTPServer(("", int(value("--port"))), Engine).serve_forever()
