"""What is known of nodes, in whatever order lists and events of nodes and of pods come."""

from __future__ import annotations

from typing import Any

from rolloutfleet.control.nodes import Nodes


def node(name: str, version: int, *, ready: bool = True) -> dict[str, Any]:
    condition = {"type": "Ready", "status": str(ready)}
    return {"metadata": {"name": name, "resourceVersion": str(version)}, "status": {"conditions": [condition]}}


def pod(host: str, version: int) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": str(version)}, "spec": {"nodeName": host}}


def listed(*names: str, at: int = 10, pods: tuple[dict[str, Any], ...] = ()) -> Nodes:
    nodes = Nodes()
    nodes.replace([node(name, 5) for name in names], str(at), pods)
    return nodes


def state(nodes: Nodes, name: str) -> bool | None:
    """True, too, while nobody has told of it: only what is known ends an engine."""
    return (nodes.states or {}).get(name, True)


def test_the_node_of_a_pod_that_is_older_than_the_list_is_gone_if_the_list_lacks_it() -> None:
    nodes = listed("a", pods=(pod("b", 7), pod("c", 12), pod("", 3)))
    assert [state(nodes, name) for name in "abc"] == [True, None, True]


def test_a_node_whose_pod_is_told_first_is_not_gone() -> None:
    nodes = listed("a")
    assert state(nodes, "new") is True
    nodes.saw(node("new", 20, ready=False), deleted=False)
    assert state(nodes, "new") is False


def test_a_list_does_not_undo_what_was_told_after_it() -> None:
    nodes = listed("a", "b")
    nodes.saw(node("b", 20), deleted=True)
    nodes.saw(node("c", 21), deleted=False)
    assert nodes.replace([node("a", 5), node("b", 5)], "15", [pod("b", 7)]) == set()
    assert [state(nodes, name) for name in "abc"] == [True, None, True]


def test_an_event_that_comes_late_or_twice_is_no_news() -> None:
    nodes = listed("a")
    assert nodes.saw(node("a", 20), deleted=True) == {"a"}
    assert nodes.saw(node("a", 20), deleted=True) == set()
    nodes.saw(node("a", 22), deleted=False)  # registered anew
    nodes.saw(node("a", 20), deleted=True)
    assert state(nodes, "a") is True


def test_a_node_that_is_gone_stays_so_while_a_pod_is_on_it_however_young() -> None:
    nodes = listed("a", "b")
    nodes.replace([node("a", 5)], "20", [pod("b", 7)])
    nodes.replace([node("a", 5)], "30", [pod("b", 40)])
    assert state(nodes, "b") is None
    nodes.replace([node("a", 5)], "50", [])
    assert nodes.states == {"a": True}
