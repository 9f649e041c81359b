"""The tensors of a checkpoint that a rank's share of a model need not read. Called by the loader."""

from __future__ import annotations

from collections.abc import Iterator

from manta.workers.checkpoints.tensor_files import TensorFiles
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.recurrent_shapes import LightningShape
from manta.workers.models.specs import DecoderSpec, ExpertsSpec
from manta.workers.models.weight_specs import WeightPart


def check_all_used(checkpoint: TensorFiles, config: ModelConfig, spec: DecoderSpec) -> None:
    """Raises `ModelError` naming tensors that the model does not have. A tied model may be saved with the head too, and
    any model with layers that are not served. Experts of other ranks are theirs to read.
    """
    unused = range(config.num_layers, config.num_layers + config.num_unused_layers)
    of_other_ranks = [*_of_other_ranks(spec)]
    tied_heads = ["lm_head.weight"] if config.tie_word_embeddings else []
    checkpoint.check_all_used(
        but=[*tied_heads, *(part.weight_name for part in of_other_ranks)],
        below=(*(f"model.layers.{layer}." for layer in unused), *_unread(config), *spec.unread),
        of_modules={part.name for part in of_other_ranks},
    )


def _unread(config: ModelConfig) -> list[str]:
    """Returns how the names of tensors begin that the checkpoint may have and no layer needs: those of keys and values
    of layers that read others', copies of shared blocks, and what is computed of other tensors.
    """
    if config.shared_blocks is not None:
        owners = enumerate(config.shared_blocks.owners)
        return [f"model.layers.{layer}.shared_transf" for layer, owner in owners if owner not in (None, layer)]
    readers = [layer for layer, source in enumerate(config.kv_sources) if layer != source]
    names = ["k_proj.", "v_proj.", "k_norm.", "v_norm."]
    if isinstance(config.recurrent, LightningShape):  # transformers writes powers of each slope
        readers, names = [*range(config.num_layers)], ["query_decay", "key_decay", "diagonal_decay"]
    return [f"model.layers.{layer}.self_attn.{name}" for layer in readers for name in names]


def _of_other_ranks(spec: DecoderSpec) -> Iterator[WeightPart]:
    """Yields the parts of the experts that this rank does not have, in whichever way a checkpoint stores them."""
    for layer in spec.layers:
        for mlp in (layer.mlp, None if layer.beside is None else layer.beside.experts):
            if not isinstance(mlp, ExpertsSpec) or mlp.held is None:
                continue
            others = (expert for index, expert in enumerate(mlp.experts) if index not in mlp.held)
            for part in (part for expert in others for linear in expert for part in linear.parts):
                yield part
                if part.elsewhere is not None:
                    yield part.elsewhere
