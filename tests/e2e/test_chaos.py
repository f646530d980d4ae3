"""Two minutes of random faults with stand-ins; `make chaos` goes on for longer, and with real engines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chaos.run import Options, run
from e2e.fleets import SHARED
from e2e.support import Kubectl

SEED = 20261128


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path(SHARED).is_dir(), reason="breaks processes and links of the local cluster's nodes"
)
def test_under_random_faults_nothing_is_lost_doubled_or_made_by_wrong_weights_and_the_fleet_converges(
    kubectl: Kubectl, operator: None
) -> None:
    verdict = run(kubectl, Options(seed=SEED, minutes=2.0, stand_ins=True), print)
    print(verdict.figures)
    assert not verdict.wrong
    assert sum(verdict.figures["faults"].values()) >= 8
    assert verdict.figures["samples"] >= 100
    assert verdict.figures["updates_committed"] >= 3
