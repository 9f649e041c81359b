"""Each part of a recurrent mixer matters: without it, the same weights give other tokens than transformers. Beside it,
other ways in which checkpoints of these families store their weights.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable

import pytest
import safetensors.torch
import torch

from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.torch_worker.tensor_check import check_tensors
from tests.checkpoints import reference_logits
from tests.workers.test_layer_kinds import NUM_TOKENS, folder_of, logits_of, rewritten
from tests.workers.test_models import random_tokens

WITHOUT_PARTS: dict[str, dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "qwen3_next": {
        "conv1d.weight": lambda kernel: kernel * torch.tensor([0.0, 0, 0, 1]),
        "A_log": lambda rates: rates + 5,
        "dt_bias": lambda bias: bias - 5,
        "linear_attn.norm.weight": torch.ones_like,
        "in_proj_ba.weight": torch.zeros_like,
        "shared_expert_gate.weight": torch.zeros_like,
        "q_norm.weight": torch.zeros_like,
    },
    "granite_hybrid": {
        "conv1d.weight": lambda kernel: kernel * torch.tensor([0.0, 0, 0, 1]),
        "conv1d.bias": torch.zeros_like,
        "A_log": lambda rates: rates + 5,
        "dt_bias": lambda bias: bias - 5,
        "mamba.D": torch.zeros_like,
        "mamba.norm.weight": torch.ones_like,
    },
    "jamba": {
        "A_log": lambda rates: rates + 5,
        "mamba.D": torch.zeros_like,
        "dt_proj.bias": torch.zeros_like,
        "dt_layernorm.weight": torch.zeros_like,
        "b_layernorm.weight": lambda weight: weight.flip(0),
    },
    "kimi_linear": {
        "A_log": lambda rates: rates + 5,
        "dt_bias": torch.zeros_like,
        "f_a_proj.weight": torch.zeros_like,
        "g_a_proj.weight": torch.zeros_like,
        "o_norm.weight": torch.ones_like,
        "e_score_correction_bias": lambda bias: bias + torch.tensor([3.0, 0, 0, 0, 0, 0, 0, 3.0]),
    },
    "olmo_hybrid": {
        "k_conv1d.weight": lambda kernel: kernel * torch.tensor([0.0, 0, 0, 1]),
        "A_log": lambda rates: rates + 5,
        "g_proj.weight": torch.zeros_like,
        "o_norm.weight": torch.ones_like,
        "feedforward_layer_norm.weight": torch.ones_like,
    },
    "minimax": {
        "slope_rate": lambda slopes: slopes + 5,
        "output_gate.weight": torch.zeros_like,
        "self_attn.norm.weight": torch.ones_like,
    },
    "bailing_hybrid": {
        "A_log": lambda rates: rates + 5,
        "dt_bias": torch.zeros_like,
        "f_proj.weight": torch.zeros_like,
        "g_proj.weight": torch.zeros_like,
        "expert_bias": lambda bias: bias + torch.tensor([3.0, 0, 0, 0, 0, 0, 0, 3.0]),
    },
    "lfm3": {
        "conv.conv.weight": lambda kernel: kernel * torch.tensor([0.0, 0, 0, 0, 1]),
        "gate_proj.weight": torch.zeros_like,
        "post_operator_norm.weight": torch.ones_like,
        "post_ffn_norm.weight": torch.ones_like,
    },
    "lara_mini": {"A_log": lambda rates: rates + 5, "out_norm.weight": torch.ones_like},
    "recurrent_gemma": {
        "conv_1d.weight": lambda kernel: kernel * torch.tensor([0.0, 0, 0, 1]),
        "conv_1d.bias": torch.zeros_like,
        "recurrent_param": lambda parameter: parameter + 5,
        "input_gate_weight": torch.zeros_like,
        "input_gate_bias": torch.zeros_like,
        "recurrent_gate_weight": torch.zeros_like,
        "recurrent_gate_bias": torch.zeros_like,
        "linear_y.bias": torch.zeros_like,
    },
    "zamba": {
        "A_log": lambda rates: rates + 5,
        "mamba.D": torch.zeros_like,
        "x_proj_weight": lambda weight: weight.flip(0),
        "dt_proj_weight": lambda weight: weight.flip(0),
        "dt_proj_bias": lambda bias: bias.flip(0) + 1,
        "shared_transf.feed_forward.gate_proj.weight": torch.zeros_like,
        "layers.3.linear.weight": torch.zeros_like,
    },
    "zaya": {
        "conv_qk_depthwise.weight": lambda kernel: kernel * torch.tensor([0.0, 1]),
        "conv_qk_depthwise.bias": torch.zeros_like,
        "conv_qk_grouped.weight": lambda weight: weight * torch.tensor([0.0, 1, 1]),
        "v_proj_delayed.weight": torch.zeros_like,
        "qk_norm.temp": torch.ones_like,
        "router_states_scale": torch.zeros_like,
        "router_mlp.fc1.weight": torch.zeros_like,
        "balancing_biases": torch.zeros_like,
        "post_attention_residual_scale.residual_bias": torch.zeros_like,
        "post_mlp_residual_scale.hidden_states_scale": torch.ones_like,
        "model.input_hidden_states_bias": torch.zeros_like,
    },
    "nemotron_h": {"A_log": lambda rates: rates + 5, "mixer.norm.weight": torch.ones_like},
}
"""The tensors of each family without whose effect the tokens must differ, and what stands in their place."""


@pytest.mark.few(12)
@pytest.mark.parametrize(("name", "part"), [(name, part) for name, parts in WITHOUT_PARTS.items() for part in parts])
def test_without_a_part_of_a_mixer_the_tokens_differ(name: str, part: str, tmp_path: pathlib.Path) -> None:
    def without(tensor_name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {tensor_name: WITHOUT_PARTS[name][part](tensor) if tensor_name.endswith(part) else tensor}

    tokens = random_tokens(NUM_TOKENS)
    logits = logits_of(rewritten(folder_of(name), tmp_path / "without", without), tokens)
    assert not torch.equal(logits.argmax(-1), reference_logits(folder_of(name), tokens).argmax(-1))


def test_experts_in_two_tensors_are_read(tmp_path: pathlib.Path) -> None:
    """Qwen3.5 is published like this: gates and what they let through one after the other, outputs before inputs."""
    expert = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight")
    stacks: dict[str, dict[str, torch.Tensor]] = {}

    def grouped(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        found = expert.fullmatch(name)
        if found is None:
            return {name: tensor}
        stacks.setdefault(found[1], {})[f"{found[2]} {found[3]}"] = tensor
        return {}

    folder = rewritten(folder_of("qwen3_5_moe"), tmp_path / "stored", grouped)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    for prefix, of_layer in stacks.items():
        numbers = range(len(of_layer) // 3)
        gate_up = [torch.cat((of_layer[f"{number} gate"], of_layer[f"{number} up"])) for number in numbers]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{prefix}.down_proj"] = torch.stack([of_layer[f"{number} down"] for number in numbers])
    tensors["mtp.norm.weight"] = torch.ones(64)  # of layers that draft tokens
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    check_tensors(folder, load_model_config(folder))
    tokens = random_tokens(NUM_TOKENS)
    assert torch.equal(logits_of(folder, tokens), logits_of(folder_of("qwen3_5_moe"), tokens))
