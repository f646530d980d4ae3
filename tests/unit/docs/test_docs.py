"""The documents say what the code does: each reason is explained, manifests are valid, links lead somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutfleet.agent.store.errors import StoreBusy, StoreDamaged, StoreUnwritable
from rolloutfleet.api.agent import FleetState
from rolloutfleet.api.names import API_VERSION
from rolloutfleet.api.rollout_server import RolloutServer
from rolloutfleet.api.schema import MAP_TYPE, PRESERVE_UNKNOWN
from rolloutfleet.api.server_group import ServerGroup
from rolloutfleet.plan import engine_env, failures
from rolloutfleet.plan.engine_pod import engine_pod
from rolloutfleet.plan.engines import Weights
from rolloutfleet.plan.objects import disaggregated, wanted_children
from rolloutfleet.plan.recovery import HARMLESS_ENDS
from rolloutfleet.plan.status import SERVING
from unit.plan.test_spec_changes import SCHEMA, admitted
from unit.plan.world import DEFAULTS

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
CODE = ROOT / "operator/rolloutfleet"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SAMPLES = sorted((ROOT / "manifests/samples").glob("*.yaml"))

# What the code can say: reasons of conditions, codes of refusals. A word is said wherever a value is given the name of
# its kind: a keyword or a parameter of that name in a call, a key of a dict, a variable, a part of a returned tuple.

WORD = re.compile(r"[A-Z][A-Za-z]+")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Said:
    words: frozenset[str]
    explained: frozenset[str]
    """Expressions of the explanations that were met."""
    unclear: tuple[str, ...]
    """Where something is said that is neither a literal nor explained."""


def said(kind: str, modules: Iterable[Path], explained: Mapping[str, Collection[str]], *, tuples: bool) -> Said:
    """`explained`: what an expression that is no literal can be, by its source. `tuples`: of returned tuples too."""
    trees = {module: ast.parse(module.read_text()) for module in modules}
    shared = _positions(kind, [node for tree in trees.values() for node in _public(tree)])
    words: set[str] = set()
    met: set[str] = set()
    unclear = []
    for module, tree in trees.items():
        for expression in _given(kind, tree, shared, tuples):
            for part in _parts(expression):
                source = ast.unparse(part)
                if source in explained:
                    met.add(source)
                    words |= set(explained[source])
                elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                    words |= {part.value} - {""}
                elif not _handed_on(part, kind):
                    unclear.append(f"{module.name}:{part.lineno}: {source}")
    return Said(frozenset(words), frozenset(met), tuple(unclear))


def _positions(kind: str, definitions: Iterable[ast.AST]) -> dict[str, int]:
    """Where, in the arguments of callables, the parameter or field of this name is."""
    found = {}
    for node in definitions:
        names: list[str] = []
        if isinstance(node, Function) and node.name != "__init__":
            names = [argument.arg for argument in node.args.args if argument.arg != "self"]
        elif isinstance(node, ast.ClassDef):
            makers = [part for part in node.body if isinstance(part, Function) and part.name == "__init__"]
            fields = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
            names = [field.id for field in fields if isinstance(field, ast.Name)]
            names = [argument.arg for argument in makers[0].args.args[1:]] if makers else names
        if kind in names and isinstance(node, Function | ast.ClassDef):
            found[node.name] = names.index(kind)
    return found


def _public(tree: ast.Module) -> list[ast.AST]:
    """Functions, classes and methods that other modules can call."""
    methods = [part for node in tree.body if isinstance(node, ast.ClassDef) for part in node.body]
    return [*tree.body, *methods]


def _given(kind: str, tree: ast.Module, shared: Mapping[str, int], tuples: bool) -> Iterator[ast.expr]:
    inside = _positions(kind, set(ast.walk(tree)) - set(_public(tree)))
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=arguments, keywords=keywords):
                yield from (keyword.value for keyword in keywords if keyword.arg == kind)
                known = {**shared, **inside} if isinstance(node.func, ast.Name) else shared
                if known.get(name, len(arguments)) < len(arguments):
                    yield arguments[known[name]]
            case ast.Dict(keys=keys, values=values):
                named = zip(keys, values, strict=True)
                yield from (value for key, value in named if isinstance(key, ast.Constant) and key.value == kind)
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == kind:
                yield value
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                pairs = zip(targets, values, strict=True)
                yield from (value for target, value in pairs if isinstance(target, ast.Name) and target.id == kind)
            case ast.Return(value=ast.Tuple(elts=values)) if tuples:
                yield from (part for value in values for part in _parts(value) if _like_a_word(part))


def _parts(expression: ast.expr) -> Iterator[ast.expr]:
    """What the expression can come to."""
    match expression:
        case ast.IfExp(body=body, orelse=other):
            yield from (*_parts(body), *_parts(other))
        case ast.BoolOp(values=values):
            for value in values:
                yield from _parts(value)
        case _:
            yield expression


def _like_a_word(expression: ast.expr) -> bool:
    match expression:
        case ast.Constant(value=str(text)):
            return WORD.fullmatch(text) is not None
        case ast.JoinedStr(values=[ast.Constant(value=str(first)), *_] as parts):
            fixed = "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))
            return WORD.fullmatch(first) is not None and fixed.isalpha()
    return False


def _handed_on(expression: ast.expr, kind: str) -> bool:
    """Said elsewhere: an attribute or variable of that name, or all values of a call."""
    match expression:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name == kind
    return isinstance(expression, ast.Starred)


# The runbook

KUBERNETES = "Kubernetes' own words"
"""Section of the runbook for what kubelet and scheduler say, which is handed on word for word."""

REASON_MODULES = [
    *sorted((CODE / "plan").glob("*.py")),
    *(module for module in sorted((CODE / "control").glob("*.py")) if module.name != "webhook.py"),  # refuses pods
    CODE / "agent/membership.py",
]
API_REASONS = ("Forbidden", "Invalid", "BadRequest", "Refused")
REASONS = {
    # Kubernetes' own: in a section of the runbook, which cannot be complete.
    "condition.get('reason')": (),
    "status['reason']": (),
    "_WAITING_REASONS.get(waiting['reason'], waiting['reason'])": failures._WAITING_REASONS.values(),
    "terminated['reason']": ("StartError", "ContainerCannotRun"),  # under a condition that names these two
    # Ours, under a name or put together.
    "SERVING": (SERVING,),
    "cause": [cause for _, cause in failures._REFUSALS],
    "f\"Pod{reason or 'Refused'}\"": [f"Pod{reason}" for reason in API_REASONS],
    "f\"PodGroup{error.reason or 'Refused'}\"": [f"PodGroup{reason}" for reason in API_REASONS],
    "f'Weights{late[0].weights.value}'": [f"Weights{w.value}" for w in Weights if w is not Weights.CURRENT],
    "f'RolloutServer{self.state.value}'": [
        f"RolloutServer{state.value}" for state in FleetState if state is not FleetState.UNREACHABLE
    ],
}
"""Expressions that stand for a reason and are no literal, and what they can be."""

CODE_MODULES = [
    *sorted((CODE / "agent").glob("*.py")),
    *sorted((CODE / "agent/collection").glob("*.py")),
    *sorted((CODE / "agent/observing").glob("*.py")),
    CODE / "agent/store/errors.py",
    CODE / "trainer/client.py",
    CODE / "trainer/collecting.py",
]
CODES = {
    "self.state.value": [state.value for state in FleetState if state is not FleetState.CONNECTED],
    "type(error).__name__": [kind.__name__ for kind in (StoreBusy, StoreDamaged, StoreUnwritable)],
    "refusal.code": (),  # said where the refusal is made
    "failure.code": (),
}


def explained(column: str, *, in_kubernetes_words: bool = False) -> set[str]:
    """Words in the first cells of the runbook's tables whose first column has this name."""
    words: set[str] = set()
    for section in (DOCS / "runbook.md").read_text().split("\n## ")[1:]:
        if column == "reason" and section.startswith(f"{KUBERNETES}\n") is not in_kubernetes_words:
            continue
        rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")]
        if rows[:1] == [column]:
            words |= {word for row in rows[2:] for word in re.findall(r"[A-Z]\w+", re.sub(r"`.*?`|\(.*?\)", "", row))}
    return words


def test_every_reason_of_the_code_is_in_the_runbook_and_every_one_there_is_of_the_code() -> None:
    found = said("reason", REASON_MODULES, REASONS, tuples=True)
    assert not found.unclear, "say in REASONS what these can be"
    assert found.explained == REASONS.keys(), "REASONS explains what the code does not say any more"
    theirs = explained("reason", in_kubernetes_words=True)
    assert theirs, f"the runbook has no section {KUBERNETES}"
    assert found.words - theirs == explained("reason")
    assert theirs | explained("reason") >= HARMLESS_ENDS


def test_no_way_of_saying_a_reason_is_overlooked(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        """
class Field:
    pod: str
    reason: str
class Made:
    def __init__(self, reason): ...
def function(pod, reason): ...
def outer(a, b):
    def emit(warning, reason): ...
    emit(True, "Inner")
    a.emit(True, "another function of that name")
    f(reason="Keyword", message="no reason")
    Field(b, "ByField")
    Made("ByInit")
    module.function(b, "ByPosition")
    function(b, *handed_on())
    reason = "Variable" if a else a.reason or "Otherwise"
    phase, reason = "NoReason", "Assigned"
    things = {"reason": "Key", "other": "NoReason"}
    f(reason=f"Put{a}", message=f"Put{a}")
    f(reason=words[a])
    f(reason=b)
    if a:
        return "Returned", "a message", f"{b}: one", a.reason
    return f"Joined{a}", ""
"""
    )
    found = said("reason", [module], {"f'Put{a}'": ["PutOne"]}, tuples=True)
    plain = {"Inner", "Keyword", "ByField", "ByInit", "ByPosition", "Variable", "Otherwise", "Assigned", "Key"}
    assert found.words == plain | {"PutOne", "Returned"}
    assert {place.partition(": ")[2] for place in found.unclear} == {"words[a]", "b", "f'Joined{a}'"}
    assert said("reason", [module], {}, tuples=False).words == plain


def test_every_code_of_the_agent_is_in_the_runbook_and_every_one_there_is_of_the_agent() -> None:
    found = said("code", CODE_MODULES, CODES, tuples=False)
    assert not found.unclear, "say in CODES what these can be"
    assert found.explained == CODES.keys()
    assert found.words == explained("code")


# Manifests


def blocks(page: Path) -> Iterator[tuple[int, str]]:
    """(offset, text) of each YAML block."""
    for fence in re.finditer(r"^( *)```yaml\n(.*?)^\1```", page.read_text(), re.MULTILINE | re.DOTALL):
        yield fence.start(), re.sub(rf"^{fence[1]}", "", fence[2], flags=re.MULTILINE)


def manifests() -> Iterator[Any]:
    texts = [(sample.name, sample.read_text()) for sample in SAMPLES]
    texts += [(page.name, block) for page in PAGES for _, block in blocks(page)]
    for place, text in texts:
        for number, manifest in enumerate(yaml.safe_load_all(text)):
            if isinstance(manifest, dict) and manifest.get("kind") == "RolloutServer":
                yield pytest.param(manifest, id=f"{place} {number}")


def unknown_fields(node: dict[str, Any], found: Any, path: str) -> Iterator[str]:
    if node.get(PRESERVE_UNKNOWN) or node.get(MAP_TYPE) == "atomic":
        return
    if isinstance(found, dict):
        for name, value in found.items():
            child = node.get("properties", {}).get(name, node.get("additionalProperties"))
            if child is None:
                yield f"{path}.{name}"
            else:
                yield from unknown_fields(child, value, f"{path}.{name}")
    elif isinstance(found, list):
        for item in found:
            yield from unknown_fields(node["items"], item, f"{path}[]")


def test_every_yaml_block_is_read_and_every_sample_is_a_server() -> None:
    servers = {str(parameter.id).split()[0] for parameter in manifests()}
    assert servers >= {"README.md", "from-slime-and-verl.md", "encoders.md", *(sample.name for sample in SAMPLES)}


@pytest.mark.parametrize("manifest", list(manifests()))
def test_a_manifest_is_taken_as_it_is_and_pods_come_of_it(manifest: dict[str, Any]) -> None:
    assert manifest["apiVersion"] == API_VERSION
    assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(manifest["metadata"]) <= {"name", "namespace", "labels", "annotations"}
    assert list(unknown_fields(SCHEMA["properties"]["spec"], manifest["spec"], "spec")) == []
    assert admitted(manifest)
    body = {**manifest, "metadata": {"namespace": "rl", "uid": "uid", **manifest["metadata"]}}
    server = RolloutServer.model_validate(body)
    made = [
        ServerGroup.model_validate({**child, "metadata": {**child["metadata"], "uid": f"uid-{number}"}})
        for number, child in enumerate(wanted_children(server, DEFAULTS, pairs=disaggregated(server, ())))
        if child["kind"] == "ServerGroup"
    ]
    assert [group.name for group in made] == server.server_groups
    for group in made:
        for rank in range(group.spec.own_engine.nodes) if group.spec.external is None else ():
            pod = engine_pod(group, index=0, epoch=1, rank=rank, defaults=DEFAULTS)["spec"]
            volumes = {volume["name"] for volume in pod.get("volumes", [])}
            for container in pod["containers"]:
                assert container["image"]
                assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes


IN_NO_GUIDE = {
    "cpu.yaml",  # for the test cluster, by make quickstart
    "gpu.yaml",  # named in README
}


def without_head(sample: Path) -> str:
    """A sample without the comment above it."""
    return re.sub(r"\A(#.*\n)+", "", sample.read_text())


def test_a_guide_that_says_it_shows_a_sample_shows_it_and_each_sample_is_shown() -> None:
    shown = set()
    for page in sorted((DOCS / "guides").glob("*.md")):
        for mention in re.finditer(r"`manifests/samples/([\w.-]+)`", page.read_text()):
            block = next((block for offset, block in blocks(page) if offset > mention.start()), "")
            assert block == without_head(ROOT / "manifests/samples" / mention[1]), f"{page.name}: {mention[1]}"
            shown.add(mention[1])
    assert shown == {sample.name for sample in SAMPLES} - IN_NO_GUIDE


# Links


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """(target, anchor) of each relative link."""
    prose = re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield ((page.parent / path).resolve() if path else page), anchor


def anchors(page: Path) -> set[str]:
    """As GitHub names the headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), target
        assert not anchor or anchor in anchors(target), f"{target.name} has no heading {anchor}"


def test_the_guide_of_defaults_has_a_row_for_each_variable_of_engines_with_its_value() -> None:
    section = (DOCS / "guides/engine-defaults.md").read_text().partition("## Environment of engines\n")[2]
    told: dict[str, str] = {}
    for row in section.partition("\n\n")[0].splitlines()[2:]:
        names, value = (cell.strip() for cell in row.split("|")[1:3])
        told |= dict.fromkeys(re.findall(r"`([A-Z_]+)`", names), value.strip("`").partition(",")[0])
    assert told.pop("SGLANG_HOST_IP") == "the pod's IP"
    assert told == engine_env.DEFAULTS


def test_every_document_is_reached_from_the_index() -> None:
    reached: set[Path] = set()
    ahead = [DOCS / "index.md"]
    while ahead:
        found = ahead.pop()
        if found in reached:
            continue
        reached.add(found)
        if found.is_dir():
            ahead += [child for child in found.iterdir() if child.is_file()]
        elif found.suffix == ".md":
            ahead += [target for target, _ in links(found)]
    documents = {path for path in DOCS.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert documents - reached == set()
