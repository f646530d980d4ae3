"""SGLang engines and sglang-router over HTTP: endpoints, payloads, time-outs, errors."""
