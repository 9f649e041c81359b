"""Tiny checkpoints with draft heads, and what the heads compute by the published formula (DeepSeek-AI, 2024, section
2.2), which transformers leaves out: there it runs a head's layer alone, as the only one of a model.
"""

from __future__ import annotations

import functools
import json
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.checkpoints import on_one_thread, randomise, reference_model, set_buffers
from tests.workers.test_layer_kinds import CASES, SIZES, folder_of

HEADS = (
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "deepseek_v3", "deepseek_v32"),
    *("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "glm5_next", "mimo_v2"),
)
"""The kinds of layers whose families have heads that are run."""
OF_QWEN = HEADS[:3]
"""Those that store a head with a prefix of its own, and norms less one."""
PARTS = ("layer", "embedding_norm", "hidden_norm", "join", "final_norm")
_FIRST = "model.layers.0."
_root = tempfile.TemporaryDirectory(prefix="manta-draft-heads-")

Block = Callable[[np.ndarray], np.ndarray]
"""The layer and the last norm of a head: [num_tokens, hidden] -> [num_tokens, hidden]."""


def head_names(kind: str) -> dict[str, str]:
    """The published names of a head's parts; that of its layer is a prefix."""
    if kind in OF_QWEN:
        norms = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"
        return dict(zip(PARTS, ("mtp.layers.0.", *norms, "mtp.fc", "mtp.norm"), strict=True))
    is_mimo = kind == "mimo_v2"
    layer = "model.mtp.layers.0." if is_mimo else f"model.layers.{SIZES['num_hidden_layers']}."
    others = "enorm", "hnorm", "eh_proj", "final_layernorm" if is_mimo else "shared_head.norm"
    return dict(zip(PARTS, (layer, *(f"{layer}{part}" for part in others)), strict=True))


@functools.cache
def layer_model(kind: str, changes: str = "{}") -> Any:
    """A model whose only layer and last norm are those of a head. `changes` of the configuration are in JSON."""
    case = CASES[kind]
    options = SIZES | case.options | json.loads(changes) | {"num_hidden_layers": 1}
    of_head = {"layer_types": ["full_attention"], "mlp_only_layers": [], "mlp_layer_types": ["sparse"]}
    options |= {key: value for key, value in of_head.items() if key in options}
    if kind not in OF_QWEN:
        options["first_k_dense_replace"] = 0
    if kind == "mimo_v2":
        options |= {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]}
    config = getattr(transformers, case.config)(**options, dtype="float32")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    randomise(model, 5)
    with torch.no_grad():
        set_buffers(model)
    return model.eval()


def write_head(model: Any, joins: dict[str, torch.Tensor], kind: str, folder: pathlib.Path) -> None:
    """Adds a head to the checkpoint in a folder: the layer and last norm of a model of `layer_model`, and the weights
    of the norms and the linear before the layer.
    """
    with tempfile.TemporaryDirectory(dir=_root.name) as alone:
        model.save_pretrained(alone)
        stored = load_file(pathlib.Path(alone) / "model.safetensors")
    names = head_names(kind)
    of_layer = {
        names["layer"] + name.removeprefix(_FIRST): each
        for name, each in stored.items()
        if name.startswith(_FIRST) and ".hc_" not in name
    }
    if kind == "mimo_v2":
        layer = names["layer"]
        of_layer[f"{layer}pre_mlp_layernorm.weight"] = of_layer.pop(f"{layer}post_attention_layernorm.weight")
    others = {f"{names[part]}.weight": each for part, each in joins.items()}
    others[f"{names['final_norm']}.weight"] = stored["model.norm.weight"]
    path = folder / "model.safetensors"
    save_file(load_file(path) | of_layer | others, path, {"format": "pt"})
    if kind not in OF_QWEN:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


@functools.cache
def _folder(kind: str, changes: str) -> pathlib.Path:
    folder = pathlib.Path(tempfile.mkdtemp(dir=_root.name))
    shutil.copytree(folder_of(kind, **json.loads(changes)), folder, dirs_exist_ok=True)
    generator, hidden = torch.Generator().manual_seed(6), SIZES["hidden_size"]
    joins = {part: 0.2 * torch.randn(hidden, generator=generator) for part in ("embedding_norm", "hidden_norm")}
    if kind not in OF_QWEN:
        joins = {part: 1 + weight for part, weight in joins.items()}
    joins["join"] = torch.randn(hidden, 2 * hidden, generator=generator) / (2 * hidden) ** 0.5
    write_head(layer_model(kind, changes), joins, kind, folder)
    return folder


def folder_with_head(kind: str, **changes: Any) -> pathlib.Path:
    """A checkpoint of `folder_of` with a random draft head, made once a process. Do not write to it."""
    return _folder(kind, json.dumps(changes))


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMS norm over the last dimension."""
    scale = np.sqrt(np.square(x).mean(-1, keepdims=True) + eps)
    return x / scale * weight


class OneStream:
    """The layer and the last norm of a model of `layer_model`, with one residual stream instead of several."""

    def __init__(self, model: Any) -> None:
        (self._layer,), self._norm = model.model.layers, model.model.norm

    @torch.inference_mode()
    def __call__(self, x: np.ndarray) -> np.ndarray:
        with on_one_thread():
            stream, layer = torch.from_numpy(x)[None], self._layer
            is_there = torch.ones(stream.shape[:2], dtype=torch.bool)
            stream = stream + layer.self_attn(layer.input_layernorm(stream), is_there)[0]
            stream = stream + layer.mlp(layer.post_attention_layernorm(stream))
            return np.asarray(self._norm(stream)[0].numpy())


class Formula:
    """A head of a checkpoint by the formula. Its layer is computed by `block`; None lets `model`, one of `layer_model`,
    do it. `target` is transformers' model.
    """

    def __init__(
        self, kind: str, folder: pathlib.Path, target: Any, model: Any = None, block: Block | None = None
    ) -> None:
        tensors = {name: each.float().numpy() for name, each in load_file(folder / "model.safetensors").items()}
        names, shift = head_names(kind), int(kind in OF_QWEN)
        self._target, self._model = target, model
        self._block = block or self._by_transformers
        self._eps = target.config.rms_norm_eps
        self._embedding = tensors["model.embed_tokens.weight"]
        self._output = tensors.get("lm_head.weight", self._embedding)
        self._join = tensors[f"{names['join']}.weight"]
        self._norms = [shift + tensors[f"{names[part]}.weight"] for part in ("embedding_norm", "hidden_norm")]

    @torch.inference_mode()
    def hidden(self, tokens: list[int]) -> np.ndarray:
        """The model's final hidden states of tokens, [num_tokens, hidden]."""
        with on_one_thread():
            states = self._target.model(torch.tensor([tokens]), use_cache=False).last_hidden_state
        return np.array(states[0].numpy())

    def states(self, hidden: np.ndarray, next_tokens: list[int]) -> np.ndarray:
        """The head's hidden states, of those of the model at each position and of the tokens after them."""
        embedded = normed(self._embedding[next_tokens], self._norms[0], self._eps)
        joined = np.concatenate((embedded, normed(hidden, self._norms[1], self._eps)), axis=-1) @ self._join.T
        return self._block(joined)

    def logits(self, states: np.ndarray) -> np.ndarray:
        return np.asarray(states @ self._output.T)

    def drafts(self, tokens: list[int], count: int, num_zeros: int = 0) -> list[int]:
        """The most likely tokens after `tokens`: the head is applied again to its own states. At the first `num_zeros`
        positions it reads zeros instead of the model's.
        """
        hidden, followed = self.hidden(tokens[:-1]), tokens[1:]
        hidden[:num_zeros] = 0
        drafted: list[int] = []
        while True:
            last = self.states(hidden, followed + drafted)[-1:]
            drafted.append(int(self.logits(last).argmax()))
            if len(drafted) == count:
                return drafted
            hidden = np.concatenate((hidden, last))

    @torch.inference_mode()
    def _by_transformers(self, joined: np.ndarray) -> np.ndarray:
        with on_one_thread():
            inputs = torch.from_numpy(joined)[None]
            states = self._model.model(inputs_embeds=inputs, use_cache=False).last_hidden_state
        return np.asarray(states[0].numpy())


def formula_of(kind: str, block: Block | None = None, **changes: Any) -> Formula:
    """The formula of the head of `folder_with_head`."""
    model = layer_model(kind, json.dumps(changes))
    if kind == "glm5_next":
        block = OneStream(model)
    target = reference_model(folder_of(kind, **changes))
    return Formula(kind, folder_with_head(kind, **changes), target, model, block)
