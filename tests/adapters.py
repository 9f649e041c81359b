"""Random LoRA adapters of tiny checkpoints, made and saved by PEFT, which also says what they compute."""

from __future__ import annotations

import copy
import functools
import pathlib
import tempfile
from typing import Any

import peft
import torch

from tests.checkpoints import on_one_thread, reference_model

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

    def greedy(self, prompt: list[int], name: str, num_tokens: int) -> list[int]:
        """PEFT's greedy continuation with an adapter; that of the base model for an empty name."""
        if not name:
            with self._model.disable_adapter():
                return _generated(self._model, prompt, num_tokens)
        self._model.set_adapter(name)
        return _generated(self._model, prompt, num_tokens)

    def merged_greedy(self, prompt: list[int], name: str, num_tokens: int) -> list[int]:
        """The greedy continuation of the model into which an adapter is merged."""
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(reference_model(self.base)), self.folders[name])
        return _generated(loaded.merge_and_unload(), prompt, num_tokens)


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
