"""Options of the configuration: a test sets each of them, and those that no other test needs do what they say."""

from __future__ import annotations

import pathlib
import re
import time
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from manta.cluster.config import AutoscalingOptions, EngineConfig, ServeConfig
from manta.cluster.errors import RequestRefused
from manta.cluster.http.access.request_admission import decode
from manta.cluster.protocol.requests import ChatCompletionRequest, CompletionRequest
from manta.cluster.serve.ingress import ingress_deployment
from manta.cluster.serve.scaling.autoscaling import autoscaling_config
from manta.cluster.serve_limits import BatchLimits, BodyLimits
from manta.cluster.storage.records import Records
from manta.cluster.storage.storage import Storage
from manta.specdecode.ngram import NgramIndex
from manta.specdecode.speculative_config import SpeculativeConfig
from manta.structured.constraint import ConstraintError, ConstraintLimits, ConstraintSpec, check_limits

ROOT = pathlib.Path(__file__).resolve().parents[2]


def options(group: type, seen: set[type] | None = None) -> Iterator[str]:
    """The names of the options of a group and of the groups in it."""
    seen = {group} if seen is None else seen
    for field in msgspec.structs.fields(group):
        kinds = [kind for kind in (field.type, *typing.get_args(field.type)) if isinstance(kind, type)]
        groups = [kind for kind in kinds if issubclass(kind, msgspec.Struct)]
        if not groups:
            yield field.name
        for inner in groups:
            if inner not in seen:
                seen.add(inner)
                yield from options(inner, seen)


def test_a_test_sets_every_option() -> None:
    """An option that nobody sets is a constant with a reason. It is set as an argument, a key or a path of keys."""
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    names = set(options(ServeConfig))
    assert len(names) > 80
    is_set = {*re.findall(r"\b(\w+)[=:]", text), *re.findall(r"[\"'.](\w+)(?=[\"'=])", text)}
    assert not names - is_set


@pytest.mark.parametrize(
    ("body_type", "body", "limits", "field"),
    [
        (
            ChatCompletionRequest,
            {"model": "a", "messages": [{"role": "user", "content": "a"}] * 3},
            BodyLimits(max_messages=2),
            "messages",
        ),
        (
            CompletionRequest,
            {"model": "a", "prompt": ["a", "b"], "stop_token_ids": [1, 2]},
            BodyLimits(max_token_ids=3),
            "stop_token_ids",
        ),
        (
            ChatCompletionRequest,
            {"model": "a", "messages": [{"role": "user", "content": "a"}]},
            BodyLimits(max_members=4),
            "",
        ),
    ],
    ids=["max_messages", "max_token_ids", "max_members"],
)
def test_a_bound_of_bodies_is_the_operators(body_type: Any, body: dict[str, Any], limits: Any, field: str) -> None:
    encoded = msgspec.json.encode(body)
    decode(body_type, encoded, BodyLimits())
    with pytest.raises(RequestRefused) as refusal:
        decode(body_type, encoded, limits)
    assert refusal.value.refusal.field == field


@pytest.mark.parametrize(
    ("schema", "limits"),
    [
        ('{"properties": {"a": {"properties": {"b": {}}}}}', ConstraintLimits(max_nesting=4)),
        ('{"enum": [1, 2, 3]}', ConstraintLimits(max_alternatives=2)),
        ('{"properties": {"enum": {"enum": [1, 2, 3]}}}', ConstraintLimits(max_alternatives=2)),
    ],
    ids=["max_nesting", "max_alternatives", "max_alternatives of a property with a keyword's name"],
)
def test_a_bound_of_constraints_is_the_operators(schema: str, limits: ConstraintLimits) -> None:
    spec = ConstraintSpec(kind="json_schema", text=schema)
    check_limits(spec, ConstraintLimits())
    with pytest.raises(ConstraintError, match="raise max_"):
        check_limits(spec, limits)


def test_a_property_with_a_keywords_name_is_not_counted_as_that_keyword() -> None:
    schema = '{"properties": {"enum": {"type": "string", "minLength": 1, "maxLength": 4}}}'
    check_limits(ConstraintSpec(kind="json_schema", text=schema), ConstraintLimits(max_alternatives=2))


def test_prompt_lookup_compares_at_most_ngram_max_tokens() -> None:
    """The earlier of two places matches four tokens, and the later one two."""
    text = [1, 2, 3, 4, 50, 9, 9, 3, 4, 60, 8, 8, 1, 2, 3, 4]
    for ngram_max, expected in ((8, 50), (2, 60)):
        index = NgramIndex(2, ngram_max)
        index.extend(text)
        assert index.propose(1) == [expected]
    with pytest.raises(ValueError, match="ngram_min 5 exceeds ngram_max 4"):
        SpeculativeConfig(ngram_min=5, ngram_max=4)


def test_batch_files_are_kept_as_long_as_configured(tmp_path: pathlib.Path) -> None:
    records = Records(Storage(str(tmp_path)), BatchLimits(keep_s=100))
    before = int(time.time())
    for asked in (None, 1000.0):
        upload = records.files.begin_upload("a", 10)
        upload.write(b"{}\n")
        file = upload.commit("in.jsonl", asked)
        assert file.expires_at == file.created_at + 100
        assert file.created_at >= before


def test_autoscaling_uses_its_configured_targets_and_delays() -> None:
    config = autoscaling_config(
        AutoscalingOptions(
            min_replicas=0, target_waiting_tokens=7, target_ttft_s=0.5, target_kv_usage=0.3, to_zero_delay_s=11
        ),
        EngineConfig(),
    )
    kwargs = config.policy.policy_kwargs
    assert (kwargs["waiting_tokens"], kwargs["ttft_s"], kwargs["kv_usage"]) == (7, 0.5, 0.3)
    assert config.downscale_to_zero_delay_s == 11


def test_a_leaving_ingress_has_both_configured_times() -> None:
    config = ServeConfig(http_server="listener", drain_notice_s=3, drain_timeout_s=40)
    assert ingress_deployment(config, 1)._deployment_config.graceful_shutdown_timeout_s == 43
