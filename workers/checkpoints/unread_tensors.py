"""The tensors that a checkpoint may have although no layer needs them, for the loaders of all frameworks."""

from __future__ import annotations

from manta.workers.checkpoints.tensor_files import TensorFiles
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.recurrent_shapes import LightningShape


def check_all_used(files: TensorFiles, config: ModelConfig) -> None:
    """Raises `ModelError` naming tensors that the model does not have. A tied model may be saved with the head too, and
    any model with layers that are not served.
    """
    unused = range(config.num_layers, config.num_layers + config.num_unused_layers)
    files.check_all_used(
        but=["lm_head.weight"] if config.tie_word_embeddings else [],
        below=(*(f"model.layers.{layer}." for layer in unused), *_unread(config)),
    )


def _unread(config: ModelConfig) -> list[str]:
    """Returns how the names of tensors begin that the checkpoint may have and no layer needs: those of keys and values
    of layers that read others', copies of shared blocks, and what is computed of other tensors.
    """
    if config.shared_blocks is not None:
        owners = enumerate(config.shared_blocks.owners)
        return [f"model.layers.{layer}.shared_transformer." for layer, owner in owners if owner not in (None, layer)]
    readers = [layer for layer, source in enumerate(config.kv_sources) if layer != source]
    names = ["k_proj.", "v_proj.", "k_norm.", "v_norm."]
    if isinstance(config.recurrent, LightningShape):  # transformers writes powers of each slope
        readers, names = [*range(config.num_layers)], ["query_decay", "key_decay", "diagonal_decay"]
    return [f"model.layers.{layer}.self_attn.{name}" for layer in readers for name in names]
