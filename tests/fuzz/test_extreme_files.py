"""Extreme numbers in options and in a model's files; `make fuzz ARGS=--numbers` draws on."""

from __future__ import annotations

import json
import pathlib
import random
import struct

import pytest

from manta.cluster.config import load_config
from manta.workers.checkpoints.memory import read_header
from manta.workers.models.model_config import ModelError
from tests.conftest import PROVE
from tests.fuzz import extreme_files
from tests.fuzz.extreme_files import CHECKS

NUM_CASES = 5000 if PROVE else 150


@pytest.mark.parametrize("name", CHECKS)
def test_extreme_numbers_are_refused_by_name_or_taken_as_they_are(name: str) -> None:
    for seed in range(NUM_CASES):
        CHECKS[name](random.Random(seed))


def test_every_group_of_options_is_drawn_from() -> None:
    paths = extreme_files.options()
    assert {path.partition(".")[0] for path in paths} > {"engine", "batches", "streams", "key_limits", "autoscaling"}
    assert len(paths) > 60


@pytest.mark.parametrize("text", ["inf", ".nan", "1" + "0" * 400, "-" + "9" * 30])
def test_an_option_must_be_a_number_that_processes_can_send(text: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.yaml").write_text(f"engine: {{model: a}}\nclient_timeout_s: {text.replace('inf', '.inf')}\n")
    with pytest.raises(ValueError, match=r"`client_timeout_s`") as refusal:
        load_config(tmp_path / "a.yaml")
    assert len(str(refusal.value)) < 300


def test_a_size_may_not_be_endless() -> None:
    with pytest.raises(ValueError, match=r"`engine.kv_cache_bytes` cannot be "):
        load_config(None, {"engine.model": "a", "engine.kv_cache_bytes": "9" * 400 + "GB"})


@pytest.mark.parametrize("shape", [[-1, -4], [2.0, 2], [2**63, 0], [True, 4], ["2", 2], None])
def test_a_tensor_has_a_shape_of_whole_numbers(shape: object, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "model.safetensors"
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 16]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(ModelError, match=r"its header is not valid"):
        read_header(file)
