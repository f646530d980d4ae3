"""An agent and a trainer in one process that a test kills again and again: `python -m unit.store.killed_agent STORE
CHECKPOINT`. It claims, keeps partial samples, finishes, leases, trains and saves its checkpoint, as fast as it can, and
ends when all is trained."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from pathlib import Path

from rolloutfleet.agent.store.address import open_store
from rolloutfleet.agent.store.handover import Handover
from rolloutfleet.agent.store.ledger import GroupUpdate, Ledger, Run
from unit.store.world import finished, sample

RUN = Run("killed", source="x", epoch_size=300, epochs=2)
GROUPS = 4
STEPS_A_CHECKPOINT = 3


def main(store: str, checkpoint: Path) -> None:
    trained: dict[str, list[list[int]]] = json.loads(checkpoint.read_text()) if checkpoint.exists() else {}
    step = max(map(int, trained), default=0)
    agent, trainer = open_store(store), open_store(store)
    ledger = Ledger(agent, RUN, agent="agent")
    handover = Handover(trainer, RUN.name, trainer=uuid.uuid4().hex, step=step)
    print("begun", flush=True)
    while True:
        claims = ledger.claim(2 * GROUPS)
        ledger.save([GroupUpdate(claim, [sample(status="aborted")]) for claim in claims])
        ledger.save([finished(claim) for claim in claims])
        batch = handover.lease(step + 1, groups=GROUPS, minimum=1)
        if batch is not None:
            step += 1
            read = handover.read(step)
            assert [group.id for group in read] == batch
            trained[str(step)] = [list(id) for id in batch]
        if batch is None or step % STEPS_A_CHECKPOINT == 0:
            _replace(checkpoint, json.dumps(trained))
            handover.acknowledge(step)
        if batch is None and not claims:
            print("ended", flush=True)
            return
        time.sleep(0)


def _replace(path: Path, text: str) -> None:
    """As trainers save: beside it, then renamed."""
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(text)
    beside.rename(path)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
