"""What the user writes in `args` is what SGLang's process receives, after the kubelet has expanded it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rolloutfleet.api.common import OWNED_ENGINE_ARGS, EngineSpec
from rolloutfleet.api.server_group import ServerGroup, ServerGroupSpec
from rolloutfleet.plan.engine_args import MULTI_VALUE_FLAGS, engine_arguments, escape_for_kubelet, flag_words
from rolloutfleet.plan.revision import group_revision


def kubelet_expands(text: str) -> str:
    """k8s.io/kubernetes/third_party/forked/golang/expansion: no variable is defined, `$$` is a '$'."""
    return re.sub(r"\$(\$|\([^)]*\))?", lambda match: "$" if match.group(0) == "$$" else match.group(0), text)


ARGV = [
    (
        {"json-model-override-args": '{"rope_scaling":{"rope_type":"yarn","factor":4.0}}'},
        ["--json-model-override-args", '{"rope_scaling":{"rope_type":"yarn","factor":4.0}}'],
    ),
    (
        {"chat-template": "{% if x %}$(HOME) costs $$5{% endif %}"},
        ["--chat-template", "{% if x %}$(HOME) costs $$5{% endif %}"],
    ),
    ({"mem-fraction-static": "0.8"}, ["--mem-fraction-static", "0.8"]),
    ({"schedule-conservativeness": "-0.5"}, ["--schedule-conservativeness=-0.5"]),
    ({"cuda-graph-bs": "1 2 4 8"}, ["--cuda-graph-bs", "1", "2", "4", "8"]),
    ({"enable-metrics": ""}, ["--enable-metrics"]),
    (
        {"tokenizer-path": '/models/with space/and"quote'},
        ["--tokenizer-path", '/models/with space/and"quote'],
    ),
    ({"lora-paths": "a=/l/a b=/l/b"}, ["--lora-paths", "a=/l/a", "b=/l/b"]),
    ({"log-level": "info; rm -rf /tmp/x #"}, ["--log-level", "info; rm -rf /tmp/x #"]),
]


@pytest.mark.parametrize(("args", "argv"), ARGV)
def test_arguments_reach_the_process_byte_for_byte(args: dict[str, str], argv: list[str]) -> None:
    spec = {"server": "qwen", "model": {"path": "/m"}, "engine": {"image": "i", "args": args}}
    group = ServerGroup.model_validate({"metadata": {"name": "qwen-main", "namespace": "rl"}, "spec": spec})
    received = [kubelet_expands(word) for word in engine_arguments(group, index=0, epoch=1, rank=0, bind="0.0.0.0")]
    assert received[-len(argv) :] == argv


@given(st.text(alphabet="$(){}ab \"'", max_size=30))
def test_the_kubelet_never_changes_an_escaped_word(word: str) -> None:
    assert kubelet_expands(escape_for_kubelet(word)) == word


@pytest.mark.parametrize("value", [8192, True, None])
def test_values_that_are_no_strings_are_refused(value: object) -> None:
    with pytest.raises(ValidationError, match=r"args\.max-total-tokens"):
        EngineSpec.model_validate({"image": "i", "args": {"max-total-tokens": value}})


@given(st.permutations(["mem-fraction-static", "device", "enable-metrics", "log-level"]))
def test_the_order_of_keys_recycles_no_engine(order: list[str]) -> None:
    def revision(keys: list[str]) -> str:
        args = dict.fromkeys(keys, "1")
        spec = {"server": "qwen", "model": {"path": "/m"}, "engine": {"image": "i", "args": args}}
        return group_revision(ServerGroupSpec.model_validate(spec))

    assert revision(order) == revision(sorted(order))
    assert flag_words(dict.fromkeys(order, "1")) == flag_words(dict.fromkeys(sorted(order), "1"))


def test_scaling_and_recovery_settings_recycle_no_engine_but_an_image_does() -> None:
    def revision(**changes: object) -> str:
        spec = {"server": "qwen", "model": {"path": "/m"}, "engine": {"image": "i"}, **changes}
        return group_revision(ServerGroupSpec.model_validate(spec))

    assert revision() == revision(replicas=7) == revision(recovery={"startupDeadlineSeconds": 60})
    assert revision() != revision(engine={"image": "other"})
    assert revision() != revision(template={"metadata": {"labels": {"a": "b"}}})


def test_flags_with_several_values_are_none_of_the_operators() -> None:
    assert not MULTI_VALUE_FLAGS & set(OWNED_ENGINE_ARGS)
