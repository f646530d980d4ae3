"""`rolloutfleet inject -f pod.yaml`: the agent put into manifests, where no webhook is wanted."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rolloutfleet.cli.session import Verbs
from rolloutfleet.plan.injection import InjectionError, inject


def add_to(verbs: Verbs) -> None:
    parser = verbs.add_parser("inject", help="print manifests with the agent in annotated pods")
    parser.add_argument("-f", "--filename", required=True, help="manifests as YAML or JSON; - for standard input")
    parser.add_argument("--agent-image", required=True, help="the image that the operator was installed with")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    try:
        text = sys.stdin.read() if options.filename == "-" else Path(options.filename).read_text()
        documents = [
            inject_manifest(document, agent_image=options.agent_image)
            for document in yaml.safe_load_all(text)
            if document is not None
        ]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, InjectionError) as error:
        print(f"rolloutfleet inject: {error}", file=sys.stderr)
        return 2
    yaml.safe_dump_all(documents, sys.stdout, sort_keys=False)
    return 0


def inject_manifest(manifest: Mapping[str, Any], *, agent_image: str) -> dict[str, Any]:
    """A pod, or anything that holds a pod template (Job, CronJob, Deployment, custom resources, List)."""
    if not isinstance(manifest, Mapping):
        raise InjectionError(f"{str(manifest)[:80]!r}: not a Kubernetes manifest")
    if manifest.get("kind") == "Pod":
        return inject(manifest, agent_image=agent_image)
    return {key: _inside(key, value, agent_image) for key, value in manifest.items()}


def _inside(key: str, value: Any, agent_image: str) -> Any:
    if key == "items" and isinstance(value, list):
        return [inject_manifest(item, agent_image=agent_image) if isinstance(item, Mapping) else item for item in value]
    if key == "template" and isinstance(value, Mapping) and "spec" in value:
        return inject(value, agent_image=agent_image)
    if isinstance(value, Mapping):
        return {inner: _inside(inner, held, agent_image) for inner, held in value.items()}
    return value
