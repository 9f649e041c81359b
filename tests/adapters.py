"""Random LoRA adapters of tiny checkpoints, made and saved by PEFT, which also says what they compute. Those of modules
that PEFT does not know apart are written here, and merged into the weights.
"""

from __future__ import annotations

import copy
import functools
import json
import pathlib
import shutil
import tempfile
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import on_one_thread, reference_model
from tests.gguf_files import ARCHITECTURES, add_tensor, gguf_name, interleaved

_FOLDERS = tempfile.TemporaryDirectory(prefix="manta-adapters-")


class Adapters:
    """A base model in `base` with adapters of PEFT's, each saved in a folder."""

    def __init__(self, base: pathlib.Path) -> None:
        self.base = base
        self.folders: dict[str, str] = {}
        self._model: Any = None

    def add(self, name: str, seed: int = 0, **options: Any) -> str:
        """Makes an adapter with random halves and returns the folder in which it is saved. `options` are those of
        `LoraConfig`.
        """
        import peft  # takes seconds

        config = peft.LoraConfig(**{"r": 4, "lora_alpha": 16, "target_modules": "all-linear", **options})
        torch.manual_seed(seed)
        if self._model is None:
            self._model = peft.get_peft_model(copy.deepcopy(reference_model(self.base)), config, adapter_name=name)
        else:
            self._model.add_adapter(name, config)
        with torch.no_grad():
            for key, weight in self._model.named_parameters():
                if f".{name}." in key and "lora_" in key:
                    rank = min(weight.shape) if "lora_A" in key else weight.shape[1]
                    weight.normal_(std=(0.5 if "lora_A" in key else 0.4) / max(1, rank) ** 0.5)
        folder = pathlib.Path(_FOLDERS.name) / f"{self.base.parent.name}-{self.base.name}-{name}-{seed}"
        self._model.save_pretrained(folder, selected_adapters=[name])
        self.folders[name] = str(folder if name == "default" else folder / name)
        return self.folders[name]

    def convert(self, adapter: str, file: pathlib.Path, kind: str = "F32", **metadata: object) -> str:
        """Writes an adapter as a GGUF file, as llama.cpp's `convert_lora_to_gguf.py` does, with its first halves
        of type `kind`, and returns its path. Values of `metadata` replace the converter's; None leaves one out, and two
        underscores stand for a dot.
        """
        folder = pathlib.Path(self.folders[adapter])
        alpha = json.loads((folder / "adapter_config.json").read_text())["lora_alpha"]
        config = json.loads((self.base / "config.json").read_text())
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        architecture = ARCHITECTURES[config["architectures"][0]]
        writer = gguf.GGUFWriter(file, architecture)
        values = {"general__type": "adapter", "adapter__type": "lora", "adapter__lora__alpha": float(alpha), **metadata}
        for key, value in values.items():
            name = key.replace("__", ".")
            writer.kv_data[0].pop(name, None)
            if isinstance(value, float):
                writer.add_float32(name, value)
            elif value is not None:
                writer.add_string(name, str(value))
        for stored, tensor in load_file(folder / "adapter_model.safetensors").items():
            base, _, half = stored.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
            rows, module = tensor.numpy(), base.rpartition(".")[2]
            if architecture == "llama" and half == "lora_B" and module in heads:
                rows = interleaved(rows, heads[module])
            stored_kind = kind if half == "lora_A" else "F32"
            add_tensor(writer, f"{gguf_name(f'{base}.weight')}.{half.lower()}", rows, lambda _, each=stored_kind: each)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return str(file)

    def greedy(self, prompt: list[int], name: str, num_tokens: int) -> list[int]:
        """PEFT's greedy continuation with an adapter; that of the base model for an empty name."""
        if not name:
            with self._model.disable_adapter():
                return _generated(self._model, prompt, num_tokens)
        self._model.set_adapter(name)
        return _generated(self._model, prompt, num_tokens)

    def together(self, scales: dict[str, float]) -> str:
        """Makes PEFT's combination of adapters, each multiplied by a scale, and returns its name."""
        name = "-".join(f"{adapter} {scale:g}".replace(".", "_") for adapter, scale in scales.items())
        if name not in self._model.peft_config:
            self._model.add_weighted_adapter([*scales], [*scales.values()], name, combination_type="cat")
        return name

    def merged_greedy(self, prompt: list[int], name: str, num_tokens: int) -> list[int]:
        """The greedy continuation of the model into which an adapter is merged."""
        import peft

        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(reference_model(self.base)), self.folders[name])
        return _generated(loaded.merge_and_unload(), prompt, num_tokens)


def write_adapter(base: pathlib.Path, folder: pathlib.Path, modules: tuple[str, ...], rank: int) -> pathlib.Path:
    """Writes a random adapter as PEFT saves it, without PEFT, and returns its folder. It changes the modules of `base`
    whose names end so.
    """
    generator, halves = torch.Generator().manual_seed(rank), {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(modules):
            for half, shape in (("A", (rank, weight.shape[1])), ("B", (len(weight), rank))):
                values = torch.randn(shape, generator=generator) * (0.5 if half == "A" else 0.4) / rank**0.5
                halves[f"base_model.model.{module}.lora_{half}.weight"] = values
    folder.mkdir()
    save_file(halves, folder / "adapter_model.safetensors")
    targets = sorted({module.rpartition(".")[2] for module in modules})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(base: pathlib.Path, adapter: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Writes the model whose weights have an adapter of `write_adapter` in them, and returns its folder."""
    shutil.copytree(base, folder)
    weights, halves = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in weights:
        prefix = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{prefix}A.weight" in halves:
            weights[name] = weights[name] + 2 * halves[f"{prefix}B.weight"] @ halves[f"{prefix}A.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@functools.cache
def adapters_of(base: pathlib.Path) -> Adapters:
    """The adapters of a checkpoint, which a process makes once."""
    return Adapters(base)


def _generated(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    with on_one_thread(), torch.inference_mode():
        answer = model.generate(
            input_ids=torch.tensor([prompt]),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
    return answer[0, len(prompt) :].tolist()
