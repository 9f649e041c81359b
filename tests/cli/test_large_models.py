"""A model larger than memory is refused with what would fit, before its weights are read. Large files are sparse."""

from __future__ import annotations

import json
import os
import pathlib
import shutil

import pytest

from manta import LLM
from manta.cluster.cli import check
from manta.cluster.cli.__main__ import main
from manta.cluster.config import EngineConfig
from manta.workers.models.model_config import ModelError
from manta.workers.platforms.cpu import CpuPlatform
from tests.checkpoints import checkpoint, make_tokenizer
from tests.gguf_files import write_gguf

HIDDEN, INNER, LAYERS, VOCABULARY = 8192, 28672, 80, 32000
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
OF_LAYER = {
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (1024, HIDDEN),
    "self_attn.v_proj": (1024, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Llama 2 70B's shape, without data."""
    folder = tmp_path_factory.mktemp("large")
    shapes = {"model.embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN), "model.norm": (HIDDEN,)}
    shapes |= {f"model.layers.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in OF_LAYER.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    make_tokenizer(folder)
    return folder


def test_check_names_what_the_model_takes_in_fewer_bits(
    large: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if check.free_memory() > 128 * 2**30:
        pytest.skip("this machine could serve it")
    assert main(["check", str(large)]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "its weights take 128.48 GiB in bfloat16" in said
    assert "96.79 GiB with weights: lossless, 65.48 GiB with weights: int8 and 36.60 GiB with weights: int4" in said


@pytest.mark.parametrize(
    ("gib", "remedy"),
    [
        (
            120,
            "they take 96.79 GiB with weights: lossless, 65.48 GiB with weights: int8 and 36.60 GiB with weights: int4",
        ),
        (50, "they take 36.60 GiB with weights: int4"),
        (
            20,
            "take a smaller model (this one takes 96.79 GiB with weights: lossless, 65.48 GiB with weights: int8 and "
            "36.60 GiB with weights: int4)",
        ),
    ],
)
def test_serve_names_the_weights_that_fit(
    large: pathlib.Path, gib: int, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "free_memory", lambda: gib << 30)
    with pytest.raises(ModelError) as raised:
        check.check_machine(EngineConfig(model=str(large), device="cpu"))
    assert str(raised.value).endswith(remedy)
    monkeypatch.setattr(check, "free_memory", lambda: 129 << 30)
    check.check_machine(EngineConfig(model=str(large), device="cpu"))
    monkeypatch.setattr(check, "free_memory", lambda: 40 << 30)
    check.check_machine(EngineConfig(model=str(large), device="cpu", weights="int4"))


def test_a_cache_that_does_not_fit_beside_the_weights_is_refused_with_one_that_does(
    large: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "free_memory", lambda: 130 << 30)
    with pytest.raises(ModelError, match=r"lower kv_cache_bytes to at most 1\.52 GiB"):
        check.check_machine(EngineConfig(model=str(large), device="cpu", kv_cache_bytes=8 << 30))


def test_every_engine_refuses_what_its_machine_cannot_hold(
    large: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it was started: on another node, or when a model is asked for."""
    monkeypatch.setattr(CpuPlatform, "free_memory", lambda *_: 50 << 30)
    with pytest.raises(ModelError, match=r"50\.00 GiB of memory is free; they take 36\.60 GiB with weights: int4"):
        LLM(str(large), device="cpu", num_threads=1, kv_cache_bytes="4MiB")


@pytest.mark.parametrize("is_checked_by", ["serve", "an engine"])
def test_blocks_count_as_they_are_kept(
    is_checked_by: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q3_K has 3.4 bits a weight in a file, and 6 in memory."""
    original = checkpoint("llama", hidden_size=256, intermediate_size=256)
    path = write_gguf(original, tmp_path / "model.gguf", lambda name: "Q3_K")
    free = int(1.3 * path.stat().st_size)
    monkeypatch.setattr(check, "free_memory", lambda: free)
    monkeypatch.setattr(CpuPlatform, "free_memory", lambda *_: free)
    words = "of memory is free; free some, or take a smaller model"
    if is_checked_by == "serve":
        with pytest.raises(ModelError, match=words):
            check.check_machine(EngineConfig(model=str(path), device="cpu"))
    else:
        with pytest.raises(ModelError, match=words):
            LLM(str(path), device="cpu", num_threads=1, kv_cache_bytes="1MiB")


def test_models_that_start_together_must_fit_together(
    large: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = shutil.copytree(large, tmp_path / "other", symlinks=True, copy_function=os.link)
    models, refused = [f"a={large}", f"b={other}", "--device", "cpu"], []
    monkeypatch.setattr("manta.cluster.cli.serve._check_port", lambda *_: None)
    monkeypatch.setattr("manta.cluster.cli.serve._serve_until_signal", lambda config, *_: refused.append(False))
    for gib in (200, 300):
        monkeypatch.setattr(check, "free_memory", lambda gib=gib: gib << 30)
        code = main(["serve", *models])
        assert code == (2 if gib == 200 else 0)
    assert refused == [False]


def test_two_names_of_one_model_hold_its_weights_once(large: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "free_memory", lambda: 140 << 30)
    engine = EngineConfig(model=str(large), device="cpu")
    check.check_machine(engine, [engine])
