"""A model larger than memory is refused with what would fit, before its weights are read. Its file is sparse."""

from __future__ import annotations

import json
import pathlib

import pytest

from manta.cluster.cli import check
from manta.cluster.cli.__main__ import main
from manta.cluster.config import EngineConfig
from manta.workers.models.model_config import ModelError
from tests.checkpoints import make_tokenizer

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
    assert "65.48 GiB with weights: int8 and 36.60 GiB with weights: int4" in said


@pytest.mark.parametrize(
    ("gib", "remedy"),
    [
        (120, "they take 65.48 GiB with weights: int8 and 36.60 GiB with weights: int4"),
        (50, "they take 36.60 GiB with weights: int4"),
        (20, "take a smaller model (this one takes 65.48 GiB with weights: int8 and 36.60 GiB with weights: int4)"),
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
