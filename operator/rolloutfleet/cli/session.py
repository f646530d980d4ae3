"""What the verbs that talk to a cluster share: options as kubectl has them, the connection, how errors are told."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rolloutfleet.kube.client import ApiError, KubeApi
from rolloutfleet.kube.config import NoCluster, load_credentials

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Verbs = Any

REFUSED = 3
"""Exit code when nothing was done: the cluster or we refused. 0 to 2 are answers of `why`."""
INTERRUPTED = 130


class Refused(Exception):
    """What was asked for makes no sense here; the text says what would."""


@dataclass(frozen=True)
class Session:
    api: KubeApi
    namespace: str


Work = Callable[[Session, argparse.Namespace], Awaitable[int]]


def add_verb(verbs: Verbs, name: str, work: Work, *, summary: str) -> argparse.ArgumentParser:
    """A verb about one RolloutServer."""
    parser = verbs.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("name", metavar="NAME", help="the RolloutServer")
    parser.add_argument("-n", "--namespace", help="default: the context's")
    parser.add_argument("--context", help="of the kubeconfig; default: the current one")
    parser.add_argument("--kubeconfig", help="default: KUBECONFIG, else ~/.kube/config")
    parser.set_defaults(run=lambda options: _run(work, options))
    return parser


def _run(work: Work, options: argparse.Namespace) -> int:
    try:
        return asyncio.run(_connected(work, options))
    except (ApiError, NoCluster, Refused) as error:
        print(f"rolloutfleet {options.verb}: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED


async def _connected(work: Work, options: argparse.Namespace) -> int:
    credentials = load_credentials(kubeconfig=options.kubeconfig, context=options.context)
    api = KubeApi(credentials, max_connections=8)
    try:
        return await work(Session(api=api, namespace=options.namespace or credentials.namespace), options)
    finally:
        await api.close()
