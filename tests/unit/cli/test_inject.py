"""`rolloutfleet inject` puts the agent into every annotated pod of a file and leaves everything else as it was."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutfleet.api.names import AGENT_CONTAINER
from rolloutfleet.cli.inject import inject_manifest
from rolloutfleet.cli.main import main

TRAINERS = """\
apiVersion: batch/v1
kind: Job
metadata: {name: train, namespace: research}
spec:
  backoffLimit: 0
  template:
    metadata: {annotations: {rolloutfleet.dev/rollout-servers: "actor=base"}}
    spec:
      restartPolicy: Never
      serviceAccountName: trainer
      containers:
      - {name: trainer, image: TRAINER_IMAGE, command: [sh, -c, "sleep 20; exit 0"]}
---
---
apiVersion: v1
kind: Namespace
metadata: {name: locked, labels: {pod-security.kubernetes.io/enforce: restricted}}
---
apiVersion: v1
kind: Pod
metadata:
  generateName: train-
  namespace: locked
  annotations: {rolloutfleet.dev/rollout-servers: "actor=base,reward=rm"}
spec:
  restartPolicy: Never
  containers:
  - {name: trainer, image: TRAINER_IMAGE}
"""


def template(value: str | None = "actor=base") -> dict[str, Any]:
    annotations = {} if value is None else {"rolloutfleet.dev/rollout-servers": value}
    return {"metadata": {"annotations": annotations}, "spec": {"containers": [{"name": "trainer", "image": "t"}]}}


def injected(spec: dict[str, Any]) -> bool:
    return [c["name"] for c in spec.get("initContainers") or []] == [AGENT_CONTAINER]


def test_jobs_and_pods_of_a_file_get_the_agent_and_other_documents_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trainers.yaml"
    path.write_text(TRAINERS)
    assert main(["inject", "-f", str(path), "--agent-image", "registry/agent:7"]) == 0
    job, namespace, pod = yaml.safe_load_all(capsys.readouterr().out)
    given_job, _, given_namespace, _ = yaml.safe_load_all(TRAINERS)
    assert namespace == given_namespace
    assert injected(job["spec"]["template"]["spec"])
    assert injected(pod["spec"])
    assert pod["spec"]["initContainers"][0]["image"] == "registry/agent:7"
    assert (job["metadata"], job["spec"]["backoffLimit"]) == (given_job["metadata"], 0)


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(TRAINERS))
    assert main(["inject", "-f", "-", "--agent-image", "registry/agent:7"]) == 0
    job, *_ = yaml.safe_load_all(capsys.readouterr().out)
    assert job["spec"]["template"]["spec"]["initContainers"][0]["image"] == "registry/agent:7"


def test_what_was_printed_can_be_fed_in_again_without_a_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trainers.yaml"
    path.write_text(TRAINERS)
    main(["inject", "-f", str(path), "--agent-image", "registry/agent:7"])
    once = capsys.readouterr().out
    path.write_text(once)
    main(["inject", "-f", str(path), "--agent-image", "registry/agent:7"])
    assert capsys.readouterr().out == once


def test_pod_templates_are_found_at_any_depth() -> None:
    cron = {"kind": "CronJob", "spec": {"jobTemplate": {"spec": {"template": template()}}}}
    found = inject_manifest(cron, agent_image="a")
    assert injected(found["spec"]["jobTemplate"]["spec"]["template"]["spec"])
    pytorch = {
        "kind": "PyTorchJob",
        "spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": 2, "template": template()}}},
    }
    worker = inject_manifest(pytorch, agent_image="a")["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert injected(worker["template"]["spec"])
    assert worker["replicas"] == 2


def test_a_list_of_manifests_is_entered() -> None:
    pods = {"kind": "List", "items": [{"kind": "Pod", **template()}, {"kind": "Pod", **template(None)}]}
    first, second = inject_manifest(pods, agent_image="a")["items"]
    assert injected(first["spec"])
    assert second == {"kind": "Pod", **template(None)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TRAINERS.replace("actor=base,reward=rm", "actor=other-namespace/qwen"), "'actor=other-namespace/qwen'"),
        ("kind: [", "line 1"),
    ],
)
def test_a_bad_file_prints_nothing_but_why_and_ends_with_2(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert main(["inject", "-f", str(path), "--agent-image", "registry/agent:7"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("rolloutfleet inject: ")
    assert said in output.err


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inject", "-f", str(tmp_path / "absent.yaml"), "--agent-image", "a"]) == 2
    assert "absent.yaml" in capsys.readouterr().err


def test_the_agents_image_is_never_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["inject", "-f", str(tmp_path / "trainers.yaml")])
    assert ended.value.code == 2
    assert "--agent-image" in capsys.readouterr().err
