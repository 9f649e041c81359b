"""Tiny EAGLE-3 heads in the two published forms, and what they compute by the formula (Li et al., 2025, and the code of
SafeAILab/EAGLE, `eagle/model/cnets.py`), in numpy around the hidden states that transformers returns.
"""

from __future__ import annotations

import functools
import json
import pathlib
import tempfile
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import VOCAB_SIZE, on_one_thread, reference_model
from tests.draft_heads import normed
from tests.specdecode.test_draft_heads import attended, rotated, sigmoid
from tests.workers.recurrent_cases import ROPE

HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, INNER, EPS = 16, 4, 2, 80, 1e-5
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 32,  # fewer than those of the texts, as published heads have
    "rms_norm_eps": EPS,
    "rope_theta": ROPE["rope_theta"],
    "hidden_act": "silu",
    "model_type": "llama",
    "tie_word_embeddings": False,
}
_root = tempfile.TemporaryDirectory(prefix="manta-eagle3-")


class Form(NamedTuple):
    """A published form of a head, for a model with four layers or three."""

    config: dict[str, Any]
    num_drafted: int
    """Tokens that the head drafts."""
    has_embedding: bool
    taps: tuple[int, ...]
    """The layers of the model whose inputs the head reads."""
    layer: str = "midlayer."
    hidden: int = 64
    norms_stream: bool = False


FORMS = {
    "SpecForge": Form(
        SIZES
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": 200,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1], "use_aux_hidden_state": True},
        },
        num_drafted=200,
        has_embedding=False,
        taps=(1, 2),
    ),
    "speculators": Form(
        {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "a model"}},
            "draft_vocab_size": VOCAB_SIZE,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
            "target_hidden_size": 64,
            "transformer_layer_config": SIZES | {"hidden_size": 48},
        },
        num_drafted=VOCAB_SIZE,
        has_embedding=True,
        taps=(0, 1, 2),
        layer="layers.0.",
        hidden=48,
        norms_stream=True,
    ),
}


def tensors_of(form: Form) -> dict[str, torch.Tensor]:
    """Random tensors of a head."""
    generator = torch.Generator().manual_seed(8)

    def linear(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=generator) / inputs**0.5

    def norm() -> torch.Tensor:
        return 1 + 0.2 * torch.randn(form.hidden, generator=generator)

    heads, width = NUM_HEADS * HEAD_DIM, 2 * form.hidden
    kv_heads = NUM_KV_HEADS * HEAD_DIM
    of_layer = {
        "self_attn.q_proj": linear(heads, width),
        "self_attn.k_proj": linear(kv_heads, width),
        "self_attn.v_proj": linear(kv_heads, width),
        "self_attn.o_proj": linear(form.hidden, heads),
        "mlp.gate_proj": linear(INNER, form.hidden),
        "mlp.up_proj": linear(INNER, form.hidden),
        "mlp.down_proj": linear(form.hidden, INNER),
        "hidden_norm": norm(),
        "input_layernorm": norm(),
        "post_attention_layernorm": norm(),
    }
    tensors = {f"{form.layer}{name}.weight": each for name, each in of_layer.items()}
    tensors |= {
        "fc.weight": linear(form.hidden, 64 * len(form.taps)),
        "norm.weight": norm(),
        "lm_head.weight": 3 * linear(form.num_drafted, form.hidden),
    }
    if form.has_embedding:
        tensors["embed_tokens.weight"] = torch.randn(VOCAB_SIZE, form.hidden, generator=generator)
    if form.num_drafted < VOCAB_SIZE:
        chosen = torch.randperm(VOCAB_SIZE, generator=generator)[: form.num_drafted].sort().values
        tensors["d2t"] = chosen - torch.arange(form.num_drafted)
        tensors["t2d"] = torch.isin(torch.arange(VOCAB_SIZE), chosen)
    return tensors


def write_eagle3(folder: pathlib.Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> pathlib.Path:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@functools.cache
def eagle3_folder(name: str = "SpecForge") -> pathlib.Path:
    """A head in one of `FORMS`, made once a process. Do not write to it."""
    form = FORMS[name]
    return write_eagle3(pathlib.Path(_root.name) / name, form.config, tensors_of(form))


class Eagle3Formula:
    """A head of `FORMS` by the formula, for the model in a folder."""

    def __init__(self, name: str, model: pathlib.Path) -> None:
        self._form = form = FORMS[name]
        stored = load_file(eagle3_folder(name) / "model.safetensors")
        self._tensors = {key: each.double().numpy() for key, each in stored.items()}
        self._model = reference_model(model)
        embedding = self._model.get_input_embeddings().weight.detach().double().numpy()
        self._embedding = self._tensors.get("embed_tokens.weight", embedding)
        self.ids = np.arange(form.num_drafted) + self._tensors.get("d2t", np.zeros(form.num_drafted)).astype(int)

    @torch.inference_mode()
    def streams(self, tokens: list[int]) -> np.ndarray:
        """The residual streams of the model that the head reads, side by side."""
        with on_one_thread():
            found = self._model.model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
        return np.concatenate([found[tap][0].double().numpy() for tap in self._form.taps], axis=-1)

    def fused(self, tokens: list[int]) -> np.ndarray:
        return np.asarray(self.streams(tokens) @ self._tensors["fc.weight"].T)

    def states(self, fused: np.ndarray, next_tokens: list[int]) -> np.ndarray:
        """The head's residual stream after its layer, at each position."""
        embedded = self._norm(self._embedding[next_tokens], "input_layernorm")
        stream = self._norm(fused, "hidden_norm")
        joined = np.concatenate((embedded, stream), axis=-1)
        if not self._form.norms_stream:
            stream = fused
        query, key, value = (
            self._linear(joined, f"self_attn.{each}_proj").reshape(len(joined), -1, HEAD_DIM) for each in "qkv"
        )
        query, key = (rotated(each, HEAD_DIM) for each in (query, key))
        key, value = (np.repeat(each, NUM_HEADS // NUM_KV_HEADS, axis=1) for each in (key, value))
        stream = stream + self._linear(attended(query, key, value), "self_attn.o_proj")
        rows = self._norm(stream, "post_attention_layernorm")
        gates = self._linear(rows, "mlp.gate_proj")
        inner = gates * sigmoid(gates) * self._linear(rows, "mlp.up_proj")
        return stream + self._linear(inner, "mlp.down_proj")

    def logits(self, states: np.ndarray) -> np.ndarray:
        """Logits over the model's tokens."""
        own = normed(states, self._tensors["norm.weight"], EPS) @ self._tensors["lm_head.weight"].T
        found = np.full((len(own), VOCAB_SIZE), -np.inf)
        found[:, self.ids] = own
        return found

    def drafts(self, tokens: list[int], count: int, bias: dict[int, float] | None = None, first: int = 0) -> list[int]:
        """The most likely tokens after `tokens`, with a bias on some, for a head that reads from position `first`."""
        fused, followed = self.fused(tokens[:-1])[first:], tokens[1 + first :]
        drafted: list[int] = []
        while len(drafted) < count:
            last = self.states(fused, followed + drafted)[-1:]
            logits = self.logits(last)[0]
            for token, each in (bias or {}).items():
                logits[token] += each
            drafted.append(int(logits.argmax()))
            fused = np.concatenate((fused, last))
        return drafted

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return normed(x, self._tensors[f"{self._form.layer}{name}.weight"], EPS)

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return np.asarray(x @ self._tensors[f"{self._form.layer}{name}.weight"].T)
