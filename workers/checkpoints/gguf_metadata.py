"""The headers of a GGUF model's files, whose metadata is read by architecture and by layer."""

from __future__ import annotations

import math
import pathlib
import struct
from typing import NamedTuple

from manta.workers.checkpoints.gguf_architectures import ARCHITECTURES
from manta.workers.checkpoints.gguf_header import GgufArray, GgufTensor, read_gguf_array
from manta.workers.models.dense import MOST_LAYERS
from manta.workers.models.model_config import ModelError
from manta.workers.models.raw_config import RawConfig, RawValue

_MOST_DIVISOR_BYTES = 2**20


class GgufFile(NamedTuple):
    """The headers of a model's files."""

    paths: tuple[pathlib.Path, ...]
    values: RawConfig
    """The metadata."""
    tensors: dict[str, GgufTensor]

    @property
    def path(self) -> pathlib.Path:
        """The file with the metadata."""
        return self.paths[0]

    @property
    def architecture(self) -> str:
        return self.values["general.architecture"].one_of(*ARCHITECTURES)

    def of_model(self, key: str) -> RawValue:
        """Returns a value under the architecture's prefix."""
        return self.values[f"{self.architecture}.{key}"]

    def ignore(self, *keys: str) -> None:
        """Notes that other values make these keys below the architecture's prefix meaningless."""
        self.values.ignore(*(f"{self.architecture}.{key}" for key in keys))

    @property
    def num_layers(self) -> int:
        """Number of layers, without those that draft tokens, which come last."""
        num_blocks = self.of_model("block_count").whole(most=MOST_LAYERS)
        return num_blocks - self.of_model("nextn_predict_layers").whole(0, least=0, most=num_blocks - 1)

    def layers_with(self, part: str) -> list[int]:
        """Returns the numbers of the layers that have a tensor, given llama.cpp's name with its suffix."""
        return [layer for layer in range(self.num_layers) if f"blk.{layer}.{part}" in self.tensors]

    def of_layers(self, key: str) -> list[int]:
        """Returns an integer of each block. Raises `ConfigError` for a list of another length."""
        value, num_layers = self.of_model(key), self.of_model("block_count").whole(most=MOST_LAYERS)
        if not isinstance(value.value, GgufArray):
            return [value.whole(least=0)] * num_layers
        listed = read_gguf_array(self.path, value.value)
        if len(listed) != num_layers or not all(isinstance(each, int) and each >= 0 for each in listed):
            raise value.refused(f"a list of {num_layers} whole numbers, one for each layer")
        return listed

    def numbers_of_layers(self, key: str) -> list[float]:
        """Returns a number of each block, perhaps infinite. Raises `ConfigError` for another list."""
        value, num_layers = self.of_model(key), self.of_model("block_count").whole(most=MOST_LAYERS)
        listed = read_gguf_array(self.path, value.value) if isinstance(value.value, GgufArray) else []
        if len(listed) != num_layers or not all(isinstance(each, float) and each == each for each in listed):
            raise value.refused(f"a list of {num_layers} numbers, one for each layer")
        return listed

    def floats(self, name: str) -> list[float]:
        """Returns the values of a small float32 tensor."""
        kind, shape, start, num_bytes, file = self.tensors[name]
        if kind != "F32" or num_bytes > _MOST_DIVISOR_BYTES:
            raise ModelError(
                f"{self.path}: {name} is of type {kind} with {num_bytes} bytes; it must be F32 with at most "
                f"{_MOST_DIVISOR_BYTES}"
            )
        with self.paths[file].open("rb") as opened:
            opened.seek(start)
            return list(struct.unpack(f"<{math.prod(shape)}f", opened.read(num_bytes)))
