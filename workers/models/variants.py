"""What the layers of a model do beyond Llama's: names for it, so that a platform can say what it does not compute.

Plain data; imports no framework. `variants_of` reads a configuration and its description.
"""

from __future__ import annotations

import enum

from manta.workers.models.families import describe
from manta.workers.models.latent_specs import LatentAttentionSpec
from manta.workers.models.model_config import ExpertsConfig, ModelConfig, ModelError
from manta.workers.models.recurrent_shapes import RecurrentKind
from manta.workers.models.specs import (
    AttentionSpec,
    CompressedAttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    RecurrentSpec,
    ShortConvSpec,
    SideBySideSpec,
)


class Variant(enum.Enum):
    """A deviation from Llama's layers. The value names it in messages."""

    SOFT_CAP = "soft caps on the products of attention"
    SINKS = "attention sinks"
    WIDE_NORMS = "norms over all heads together"
    OTHER_NORM_PLACES = "norms after attention and MLP"
    PARALLEL = "attention and MLP side by side"
    LAYER_NORMS = "norms that subtract the mean"
    RESIDUAL_SCALE = "scaled residuals"
    NORMED_STREAM = "norms that replace the residual stream"
    OUTER_SCALES = "scaled embeddings or logits"
    FINAL_CAP = "soft caps on logits"
    ACTIVATION = "gates other than SiLU"
    ROPES = "positions that differ by layer"
    EXPERTS = "experts"
    EXPERTS_BESIDE = "experts beside an MLP"
    SHORTCUT = "experts whose result is added a layer later"
    IDENTITY = "experts that return what they get"
    OTHER_ROUTERS = "routers other than a softmax over the experts"
    SCALED_INPUTS = "shares that multiply what experts get"
    GATED_NORMS = "gates on the results of norms"
    GATED_ATTENTION = "gates on the results of attention"
    SHORT_CONV = "short convolutions"
    RECURRENT = "recurrent states"
    LIGHTNING = "lightning attention"
    MATRIX_MEMORY = "matrix memories"
    GATED_LINEAR_UNITS = "real-gated linear recurrent units"
    TIME_MIXING = "time mixing"
    CHANNEL_MIXING = "channel mixing"
    SHARED_BLOCKS = "blocks that layers share"
    CONVOLVED_ATTENTION = "attention behind convolutions"
    DEEP_ROUTER = "routers behind an MLP"
    SCALED_STREAM = "factors on the residual stream"
    LATENT = "latent attention"
    SPARSE = "attention to tokens that an indexer chooses"
    COMPRESSED = "attention over compressed keys"
    TABLES = "experts that a table names for each token"
    OTHER_HEADS = "heads that differ by layer, or values that are normed or those of another layer"
    LAYER_INPUTS = "inputs of each layer"
    CHUNKS = "layers that see a chunk"
    QUERY_GROWTH = "queries that grow with their position"
    STREAMS = "several residual streams"
    CONNECTIONS = "hyper-connections"
    LIMITED_GATES = "experts whose gates are bounded"
    NGRAMS = "rows of tables of n-grams"
    DISTANCES = "biases by the distance of tokens"
    CONVOLVED_RESULTS = "convolutions of keys, values and results"
    BLOCKS = "layers that read blocks of layers"
    JOINED_INPUT = "layers that read an embedding beside the residual stream"
    DRAFT_HEAD = "draft heads"
    STORED_OTHERWISE = "linears that the checkpoint stores together or in another order"


OUTSIDE_OF_LAYERS = frozenset(
    {
        Variant.ACTIVATION,
        Variant.ROPES,
        Variant.STORED_OTHERWISE,
        Variant.OUTER_SCALES,
        Variant.FINAL_CAP,
        Variant.DRAFT_HEAD,
    }
)
"""Variants that any loop over Llama's layers computes: they are in linears, in rotary tables, or outside of layers."""


NOT_COMPUTED: dict[str, frozenset[Variant]] = {
    "cuda": frozenset(
        {
            Variant.MATRIX_MEMORY,
            Variant.SPARSE,
            Variant.IDENTITY,
            Variant.CONVOLVED_ATTENTION,
            Variant.DEEP_ROUTER,
            Variant.SCALED_STREAM,
            Variant.CONNECTIONS,
            Variant.LIMITED_GATES,
            Variant.COMPRESSED,
            Variant.TABLES,
            Variant.NGRAMS,
            Variant.DISTANCES,
            Variant.CONVOLVED_RESULTS,
            Variant.BLOCKS,
            Variant.TIME_MIXING,
            Variant.CHANNEL_MIXING,
        }
    ),
    "tpu": frozenset(
        {
            Variant.SPARSE,
            Variant.CHUNKS,
            Variant.OTHER_HEADS,
            Variant.LAYER_INPUTS,
            Variant.STREAMS,
            Variant.NGRAMS,
            Variant.DISTANCES,
            Variant.CONVOLVED_RESULTS,
            Variant.BLOCKS,
            Variant.TIME_MIXING,
            Variant.CHANNEL_MIXING,
            Variant.JOINED_INPUT,
            Variant.DRAFT_HEAD,
            Variant.EXPERTS_BESIDE,
            Variant.SHORTCUT,
            Variant.IDENTITY,
            Variant.SCALED_INPUTS,
            Variant.NORMED_STREAM,
            Variant.LIGHTNING,
            Variant.MATRIX_MEMORY,
            Variant.GATED_LINEAR_UNITS,
            Variant.SHARED_BLOCKS,
            Variant.GATED_NORMS,
            Variant.CONVOLVED_ATTENTION,
            Variant.DEEP_ROUTER,
            Variant.SCALED_STREAM,
            Variant.CONNECTIONS,
            Variant.LIMITED_GATES,
            Variant.COMPRESSED,
            Variant.TABLES,
        }
    ),
}
"""Variants that a device does not compute, by the name of the device."""


OF_KINDS = {
    RecurrentKind.LIGHTNING: Variant.LIGHTNING,
    RecurrentKind.MATRIX_MEMORY: Variant.MATRIX_MEMORY,
    RecurrentKind.RG_LRU: Variant.GATED_LINEAR_UNITS,
    RecurrentKind.TIME_MIXING: Variant.TIME_MIXING,
    RecurrentKind.CHANNEL_MIXING: Variant.CHANNEL_MIXING,
    RecurrentKind.CONVOLVED_ATTENTION: Variant.CONVOLVED_ATTENTION,
}
"""The variants of kinds of recurrent mixers that not every device with recurrent states computes."""


def variants_of(config: ModelConfig) -> frozenset[Variant]:
    """Returns the deviations of a native model."""
    spec = describe(config)
    layers, parts = spec.layers, [part for linear in spec.linears() for part in linear.parts]
    of_heads = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionSpec)]
    found = {
        Variant.SOFT_CAP: config.attention_cap != 0,
        Variant.SINKS: any(
            attention.sinks
            for attention in (layer.mixer for layer in layers)
            if isinstance(attention, AttentionSpec | LatentAttentionSpec | CompressedAttentionSpec)
        ),
        Variant.WIDE_NORMS: any(attention.has_wide_norms for attention in of_heads),
        Variant.OTHER_NORM_PLACES: any(_norms_elsewhere(spec)),
        Variant.PARALLEL: any(layer.is_parallel for layer in layers),
        Variant.LAYER_NORMS: config.has_layer_norms,
        Variant.RESIDUAL_SCALE: config.residual_scale != 1,
        Variant.NORMED_STREAM: bool(config.stream_factors),
        Variant.OUTER_SCALES: (config.embedding_scale, config.logits_scale) != (1, 1),
        Variant.FINAL_CAP: config.final_cap != 0,
        Variant.ACTIVATION: config.activation != "silu",
        Variant.EXPERTS: config.experts is not None,
        Variant.EXPERTS_BESIDE: any(layer.beside is not None for layer in layers),
        Variant.SHORTCUT: any(layer.shortcut is not None for layer in layers),
        Variant.IDENTITY: config.experts is not None and config.experts.num_identity > 0,
        Variant.OTHER_ROUTERS: config.experts is not None and not _is_plain_router(config.experts),
        Variant.SCALED_INPUTS: config.experts is not None and config.experts.scales_inputs,
        Variant.GATED_NORMS: config.norm_gate_rank > 0,
        Variant.GATED_ATTENTION: any(attention.gate is not None for attention in of_heads),
        Variant.LATENT: config.latent is not None,
        Variant.SPARSE: config.indexer is not None or config.block_indexer is not None,
        Variant.OTHER_HEADS: bool(config.layer_kv_heads or config.layer_num_heads or config.kv_sources)
        or any(attention.v_norm is not None for attention in of_heads),
        Variant.LAYER_INPUTS: spec.layer_inputs is not None or any(layer.scalar is not None for layer in layers),
        Variant.STREAMS: config.streams is not None or config.num_gated_streams > 1,
        Variant.NGRAMS: config.ngrams is not None,
        Variant.DISTANCES: config.inkling is not None,
        Variant.CONVOLVED_RESULTS: config.inkling is not None,
        Variant.BLOCKS: spec.blocks is not None,
        Variant.COMPRESSED: config.compressed is not None,
        Variant.TABLES: config.experts is not None and bool(config.experts.hashed_layers),
        Variant.CONNECTIONS: config.connections is not None,
        Variant.LIMITED_GATES: any(linear.gate_limit or linear.gate_caps for linear in spec.linears()),
        Variant.JOINED_INPUT: any(layer.joins_input for layer in layers),
        Variant.DRAFT_HEAD: config.is_draft_head,
        Variant.CHUNKS: config.windows_are_chunks,
        Variant.QUERY_GROWTH: config.query_growth is not None,
        Variant.SHORT_CONV: any(isinstance(layer.mixer, ShortConvSpec) for layer in layers),
        Variant.RECURRENT: any(isinstance(layer.mixer, RecurrentSpec | SideBySideSpec) for layer in layers),
        Variant.SHARED_BLOCKS: config.shared_blocks is not None,
        Variant.DEEP_ROUTER: any(isinstance(layer.mlp, ExpertsSpec) and layer.mlp.deep_router for layer in layers),
        Variant.SCALED_STREAM: spec.embedding_scaling is not None
        or any(layer.mixer_scaling or layer.mlp_scaling for layer in layers),
        Variant.ROPES: len(set(config.ropes)) > 1 or config.ropes[0] is None,
        Variant.STORED_OTHERWISE: any(part.order or part.piece or part.stored_rows or part.first_row for part in parts)
        or any(norm.adds_one for norm in spec.norms()),
    }
    kinds = {layer.mixer.kind for layer in layers if isinstance(layer.mixer, RecurrentSpec)}
    of_kinds = {OF_KINDS[kind] for kind in kinds if kind in OF_KINDS}
    return frozenset(variant for variant, is_there in found.items() if is_there) | of_kinds


def _is_plain_router(experts: ExpertsConfig) -> bool:
    """Whether the chosen experts' shares are scores of a softmax, and every token of every layer has such experts."""
    plain = ExpertsConfig(
        num_experts=experts.num_experts,
        num_chosen=experts.num_chosen,
        intermediate_size=experts.intermediate_size,
        normalises=experts.normalises,
    )
    return experts == plain


def _norms_elsewhere(spec: DecoderSpec) -> list[bool]:
    return [
        layer.input_norm is None
        or (layer.mlp_norm is None and not layer.is_parallel)
        or layer.mixer_output_norm is not None
        or layer.mlp_output_norm is not None
        for layer in spec.layers
    ]


def check_draft_model(config: ModelConfig) -> None:
    """Raises `ModelError` for a draft model with recurrent states, because rejected drafts would stay in them."""
    if config.state_bytes:
        raise ModelError(
            f"the draft model is a {config.architecture}, which has recurrent states, and rejected drafts would stay "
            "in them; take a draft model with attention only, or the proposer ngram"
        )


def check_block_size(config: ModelConfig, block_size: int) -> None:
    """Raises `ModelError` if a model sees its tokens in chunks that blocks of `block_size` tokens do not fill, or has
    entries or pools of tokens that such a block would part.
    """
    if config.compressed is not None and block_size % config.compressed.spread:
        raise ModelError(
            f"{config.architecture} keeps each entry of compressed keys in the rows of {config.compressed.spread} "
            f"tokens, and block_size {block_size} is no multiple; set block_size to one"
        )
    if config.indexer is not None and config.indexer.pool_len and block_size % config.indexer.pool_len:
        raise ModelError(
            f"{config.architecture} chooses pools of {config.indexer.pool_len} tokens (index_kpool), and block_size "
            f"{block_size} is no multiple; set block_size to one"
        )
    chunks = [window for window in config.sliding_windows if window is not None] if config.windows_are_chunks else []
    if any(chunk % block_size for chunk in chunks):
        raise ModelError(
            f"{config.architecture} sees its tokens in chunks of {chunks[0]} (attention_chunk_size), and block_size "
            f"{block_size} does not divide them; set block_size to a divisor"
        )


def check_variants(config: ModelConfig, device: str) -> None:
    """Raises `ModelError` if a native model has something that the device `cpu`, `cuda` or `tpu` does not compute.
    A device of another name computes everything.
    """
    if not config.native:
        return
    missing = sorted(variant.value for variant in variants_of(config) & NOT_COMPUTED.get(device, frozenset()))
    if missing:
        raise ModelError(
            f"device {device} does not compute {', '.join(missing)}, which {config.architecture} has; set device to cpu"
        )
