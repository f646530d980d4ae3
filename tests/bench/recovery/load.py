"""Runs in a trainer's pod: asks its fleet for samples without a pause, and prints one JSON line a call.

Each call asks for prompts that no other call has: so every sample can be told apart, and none counts twice.
"""

from __future__ import annotations

import json
import sys
import time

from rolloutfleet.trainer import FleetError, connect

PROMPTS = 2
SAMPLES = 2
TOKENS = 24
CALL_SECONDS = 120.0


def main() -> None:
    fleet = connect("actor")
    calls = 0
    while True:
        begun = time.time()
        prompts = [[1 + calls % 500, 1 + calls // 500 % 500, 1 + number] for number in range(PROMPTS)]
        line: dict[str, object] = {"call": calls, "begun": begun}
        try:
            groups = fleet.generate(prompts, n=SAMPLES, max_new_tokens=TOKENS, ignore_eos=True, timeout=CALL_SECONDS)
        except FleetError as error:
            line["error"] = f"{error.code}: {error}"[:300]
            time.sleep(0.5)
        else:
            samples = [sample for group in groups for sample in group.samples]
            line["statuses"] = [sample.status for sample in samples]
            line["attempts"] = max(sample.attempts for sample in samples)
            line["errors"] = [sample.error for sample in samples if sample.error][:2]
        line["seconds"] = round(time.time() - begun, 3)
        print(json.dumps(line), flush=True)
        calls += 1


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(0)
