"""The shape of a model, in one spelling for all families. Plain data; imports no framework."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import regex

from manta.workers.models.block_indexer import BlockIndexerShape
from manta.workers.models.compressed_shape import CompressedShape
from manta.workers.models.ngrams import NgramShape
from manta.workers.models.part_shapes import (
    Eagle3Shape,
    HyperConnections,
    InklingShape,
    PartScales,
    SharedBlocks,
    StreamsConfig,
)
from manta.workers.models.recurrent_shapes import RecurrentShape, StateShape

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
PATTERN_SECONDS = 10.0
"""Longest time by the clock to search for a pattern in a name. The patterns of published checkpoints take microseconds.
"""
ROUNDED_KV_BITS = {"int8": 8, "int4": 4}
"""Bits of a number in a rounded KV cache, by the option `kv_cache_dtype`."""
KV_SCALE_BYTES = 4
"""Bytes of the scale that a rounded KV cache has for each token and KV head, of its key and of its value."""


def kv_head_bytes(dtype: str, head_dim: int) -> int:
    """Returns the bytes of a token's key, or value, of one head, in a dtype of `DTYPE_BYTES` or `ROUNDED_KV_BITS`."""
    bits = ROUNDED_KV_BITS.get(dtype)
    return head_dim * DTYPE_BYTES[dtype] if bits is None else -(-head_dim * bits // 8) + KV_SCALE_BYTES


class ModelError(ValueError):
    """The model cannot be served. The message names what is missing or unsupported, and a remedy if there is one."""


DEPENDING_ON_CONTEXT = ("dynamic", "longrope")
"""Types of ropes whose angles depend on the longest context that is served (`RopeConfig.longest_context`)."""


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding (Su et al., 2021) and its scaling for contexts longer than those trained on."""

    rope_type: str = "default"
    """`default`, `linear`, `dynamic`, `llama3`, `yarn` (Peng et al., 2023), `longrope` (Ding et al., 2024), or
    `proportional`: the first `rotary_dim` dimensions rotate as they would if all did, half of them in each half of a
    head (Gemma 4).
    """
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    """Positions of the unscaled model; not for `default` and `linear`."""
    longest_context: int = 0
    """Positions for which `dynamic` stretches its angles and `longrope` chooses its factors. transformers does both
    anew for the longest sequence of each batch; here all sequences of a server have the same angles.
    """
    attention_factor: float | None = None
    """Factor on cosines and sines of yarn and longrope; None takes each paper's own."""
    mscale: float = 0.0
    """yarn: with `mscale_all_dim`, cosines and sines get `(0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim
    ln(factor) + 1)`. 0 means that it is not given.
    """
    mscale_all_dim: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether yarn rounds the bounds of the blended range to whole dimensions."""
    frequency_divisors: tuple[float, ...] | None = None
    """default: a divisor for each of the head_dim / 2 frequencies, as GGUF files store llama3's scaling."""
    short_factors: tuple[float, ...] = ()
    """longrope: divisors of the frequencies for contexts of at most `original_max_position_embeddings`;
    `long_factors` are those for longer ones.
    """
    long_factors: tuple[float, ...] = ()
    rotary_dim: int | None = None
    """Number of dimensions of each head that rotate; None for all. The others keep their numbers."""
    is_interleaved: bool = False
    """Whether neighbouring dimensions of a checkpoint's heads rotate together (GPT-J), instead of the two halves."""


class WeightFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The stored form of a quantised linear's weight."""

    reader: str
    """A key of `manta.workers.checkpoints.linear_reader.READERS`."""
    bits: int = 8
    group_size: int | None = None
    """Number of inputs that share a scale. None: all inputs of an output share one."""
    block: tuple[int, int] | None = None
    """Numbers of outputs and inputs of a block that shares a scale, instead of groups."""
    is_symmetric: bool = True
    """Whether all zero points are in the middle of the range."""
    zero_point_shift: int = 0
    """Number to add to the stored zero points."""
    has_int8_activations: bool = False
    """Whether the checkpoint was made for activations rounded to int8."""
    has_float8_activations: bool = False
    """Whether the checkpoint was made for activations rounded to E4M3."""


class QuantizationRule(msgspec.Struct, frozen=True, kw_only=True):
    """The format of the linears whose names match a pattern."""

    pattern: str
    """Regular expression to search for in the linear's name."""
    format: WeightFormat | None = None
    """None means unquantised."""


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """The formats of a checkpoint's linears. The first rule whose pattern matches a name decides."""

    method: str
    rules: tuple[QuantizationRule, ...] = ()

    def format_of(self, name: str) -> WeightFormat | None:
        """Returns the format of a linear by its name, such as `model.layers.0.mlp.down_proj`."""
        return next((rule.format for rule in self.rules if _matches(rule.pattern, name)), None)


def _matches(pattern: str, name: str) -> bool:
    """Raises `ModelError` if the pattern, whose author is not trusted, takes longer than `PATTERN_SECONDS`."""
    try:
        return regex.search(pattern, name, timeout=PATTERN_SECONDS) is not None
    except TimeoutError as error:
        raise ModelError(
            f"quantization_config: the pattern {pattern[:100]!r} takes more than {PATTERN_SECONDS:g} s for the name "
            f"{name}; mend it"
        ) from error


class HeadShape(NamedTuple):
    """The heads of one attention layer: `num_heads // num_kv_heads` query heads read each KV head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on the products of queries and keys."""
    logit_cap: float = 0.0
    """Bound `c` of the scaled products, which become `c * tanh(product / c)` (Gemma 2); 0 for none."""
    latent_dim: int = 0
    """Width of the latent vector in a cached head, which is key and value of all query heads (DeepSeek-V2); 0 for keys
    and values of their own. The other dimensions of a cached head rotate, and are key alone.
    `workers/decoders/latent_attention.py` has their order.
    """

    @property
    def keys_are_values(self) -> bool:
        """Whether a cached key is the value too: then there are no value heads, and the two caches of a layer are
        one.
        """
        return self.latent_dim > 0

    @property
    def counts(self) -> tuple[int, int, int]:
        """The numbers of query, key and value heads, which lie side by side in one row."""
        return self.num_heads, self.num_kv_heads, 0 if self.keys_are_values else self.num_kv_heads


class LatentShape(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): keys and values of all heads are products of one
    latent vector, which is cached together with one rotated key. `workers/decoders/latent_attention.py` computes it.
    """

    query_rank: int | None
    """Width of the latent vector of which the queries are products; None if they are those of the hidden state."""
    kv_rank: int
    """Width of the cached latent vector."""
    plain_dim: int
    """Dimensions of a query and a key of a head that have no positions."""
    rope_dim: int
    """Dimensions of a query and a key that rotate. All heads have the same rotated key."""
    value_dim: int
    """Width of a head's value."""
    norm_eps: float = 1e-6
    """The constant in the norms of the latent vectors, which is not that of the layers."""
    query_scale: float = 1.0
    """Factor on the queries that are products of a latent vector (LongCat-Flash)."""
    latent_scale: float = 1.0
    """Factor on the normed latent vector of keys and values."""
    has_gates: bool = False
    """Whether queries are products of their latent vector with and without its norm, and other products of these are
    numbers whose sigmoids multiply the values (A.X K2).
    """

    @property
    def query_dim(self) -> int:
        """Width of a head's query."""
        return self.plain_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """Width of what is cached of a token for attention: the latent vector and the rotated key."""
        return self.kv_rank + self.rope_dim


class IndexerShape(msgspec.Struct, frozen=True, kw_only=True):
    """The choice of the tokens that attention reads (DeepSeek-V3.2, 2025, section 2.1), which
    `workers/decoders/sparse_attention.py` computes.
    """

    num_heads: int
    head_dim: int
    """Width of a head, and of the key that is cached beside a latent vector."""
    num_chosen: int
    """The largest number of tokens that a token attends to."""
    shared_layers: tuple[int, ...] = ()
    """Layers without an indexer, which attend to the tokens that the last one before them chose."""
    is_interleaved: bool = False
    """Whether neighbouring dimensions rotate together, instead of the two halves of those that rotate."""
    rotates_last: bool = False
    """Whether the last dimensions of a head rotate, instead of the first."""
    norm_eps: float = 1e-6
    """The constant in the norm of the keys."""
    pool_len: int = 0
    """Neighbouring tokens that are chosen together, by a key that is made of theirs (GLM-5.3 Flash); 0 if tokens are
    chosen one by one.
    """

    @property
    def cached_dim(self) -> int:
        """Numbers that are cached of a token: its key, and with pools as many numbers for the weight of its key."""
        return self.head_dim * (2 if self.pool_len else 1)

    @property
    def pools(self) -> BlockIndexerShape:
        """The choice of pools, if there are any."""
        num_chosen = self.num_chosen // self.pool_len
        return BlockIndexerShape(
            num_heads=self.num_heads, head_dim=self.head_dim, block_len=self.pool_len, num_chosen=num_chosen
        )


class QueryGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """A factor on queries (Nakanishi, 2025): `1 + rate * ln(1 + floor((position + first) / period))`, or without steps
    `1 + rate * ln(max(1, (position + first) / period))`.
    """

    rate: float
    period: int
    first: int = 0
    only_without_positions: bool = False
    """Whether only layers without a rope have it."""
    has_steps: bool = True
    """Whether it is the same for `period` positions."""
    only_without_window: bool = False
    """Whether only layers without a window have it (Inkling)."""

    def is_of(self, rope: RopeConfig | None, window: int | None) -> bool:
        """Returns whether a layer with this rope and window has it."""
        if self.only_without_window and window is not None:
            return False
        return rope is None or not self.only_without_positions


LEAST_SUM = 1e-20
"""A number that is added to a sum of experts' scores that divides them, as in DeepSeek-V3."""


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of a layer and their router, which is the same in all layers that have experts."""

    num_experts: int
    """Experts among which the router chooses."""
    num_chosen: int
    """Experts that compute each token."""
    intermediate_size: int
    """The inner width of an expert."""
    num_always_chosen: int = 0
    """How many of the chosen experts, the last of all, are chosen for every token (Inkling)."""
    num_identity: int = 0
    """How many of the experts, the last ones, return what they get (LongCat-Flash)."""
    scores: str = "softmax"
    """The function that makes scores of the router's logits: `softmax` over all experts, `sigmoid`, or `sqrtsoftplus`,
    the root of `ln(1 + exp(logit))` (DeepSeek-V4).
    """
    hashed_layers: tuple[int, ...] = ()
    """Layers in which a table says which experts compute each token of the vocabulary (hash routing)."""
    normalises: bool = False
    """Whether the scores of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """Factor on the scores of the chosen experts."""
    num_groups: int = 1
    """Groups of experts, of which the best `num_chosen_groups` are searched for the best experts."""
    num_chosen_groups: int = 1
    ranks_groups_by: int = 1
    """Number of a group's best scores whose sum ranks it."""
    scores_others_zero: bool = False
    """Whether experts of groups that are not searched have the score 0 for the choice, instead of none (A.X K2)."""
    has_choice_bias: bool = False
    """Whether a bias is added to the scores for the choice alone, in families that may do without one."""
    scales_inputs: bool = False
    """Whether an expert's score multiplies its input, instead of its result (Llama 4)."""
    shared_intermediate_size: int = 0
    """The inner width of the expert that computes every token; 0 if there is none."""
    may_skip: bool = False
    """Whether the router has one more score, that of an expert that adds nothing (ZAYA)."""
    dense_layers: tuple[int, ...] = ()
    """Layers with one MLP, of `ModelConfig.intermediate_size`, instead of experts."""
    gate_limit: float = 0.0
    """Bound of an expert's gates from above, and of what they let through from both sides; 0 for none (DeepSeek-V4)."""

    @property
    def num_computing(self) -> int:
        """Number of experts that have weights, the first ones."""
        return self.num_experts - self.num_identity

    @property
    def num_scores(self) -> int:
        """Number of the router's scores of a token."""
        return self.num_experts + self.may_skip


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of one decoder-only model, or of one rank's share of it."""

    architecture: str
    """The name of the model's class in Hugging Face transformers, such as `Qwen2ForCausalLM`."""
    wrapper: str | None = None
    """The architecture of the multimodal model of which this is the text decoder; None if the checkpoint is text only.
    """
    native: bool
    """Whether `workers/models/` describes its family. Otherwise transformers' own model code runs it."""
    vocab_size: int
    """Width of the logits: rows of the head including padding, so it may exceed the tokenizer's vocabulary."""
    num_stored_tokens: int | None = None
    """Rows of the stored embedding and head, if only the first `vocab_size` ones count (Inkling)."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    """The rope of each layer, if layers differ; None for a layer without positions. If empty, all have `rope`."""
    max_position_embeddings: int
    """Longest context in tokens, rope scaling included."""
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool = False
    sliding_windows: tuple[int | None, ...]
    """Positions that a token sees in each layer, including its own; None for all."""
    layer_states: tuple[StateShape | None, ...] = ()
    """The recurrent state of each layer; None for a layer without one. If empty, no layer has one."""
    layer_attends: tuple[bool, ...] = ()
    """Whether each layer has attention, and so keys and values. If empty, all have."""
    dtype: str
    """The checkpoint's dtype: `bfloat16`, `float16` or `float32`."""
    eos_token_ids: tuple[int, ...] = ()
    has_key_bias: bool = False
    """Whether cached keys hold a bias too, such as that of their position (ALiBi; `workers/decoders/key_bias.py`)."""
    quantization: Quantization | None = None
    """Storage formats of the linears' weights; None if all are floating-point numbers."""
    sampling_defaults: tuple[tuple[str, float], ...] = ()
    """Sampling parameters that `generation_config.json` recommends, by their names in `SamplingParams`."""
    unused_keys: tuple[str, ...] = ()
    """Keys of the configuration that nothing reads and that are not known to be harmless."""

    recurrent: RecurrentShape | None = None
    """The sizes of the recurrent mixers; None if there are none, and for short convolutions."""
    inkling: InklingShape | None = None
    """The sizes of Inkling's parts; None in other families."""
    conv_bias: bool = False
    """Whether the convolutions of recurrent mixers, and LFM2's linears around them, have biases."""
    activation: str = "silu"
    """The function of an MLP's gates: `silu`, `gelu`, `gelu_tanh` or `clamped` (gpt-oss)."""
    experts: ExpertsConfig | None = None
    """The experts of layers; None if every layer has one MLP."""
    router_size: int = 0
    """Width of the MLP before the router; 0 for none."""
    latent: LatentShape | None = None
    """The shape of latent attention; None for attention over the keys and values of heads. With it `num_kv_heads` is 1,
    and `head_dim` is the width of a cached token: the latent vector, the rotated key, and perhaps an indexer's key.
    """
    indexer: IndexerShape | None = None
    """The choice of the tokens that latent attention reads, or of the entries of compressed attention; None if it reads
    all.
    """
    compressed: CompressedShape | None = None
    """The shape of compressed attention; None for other kinds. With it `num_kv_heads` is 1, and `head_dim` is the width
    of a token's row of the cache.
    """
    block_indexer: BlockIndexerShape | None = None
    """The choice of the blocks of tokens that attention over keys and values reads; None if it reads all."""
    windows_are_chunks: bool = False
    """Whether layers with a window see the tokens of their chunk, as long as the window, instead of the last ones."""
    query_growth: QueryGrowth | None = None
    """A factor on queries that grows with their position; None for none."""
    has_head_norms: bool = False
    """Whether a family whose checkpoints may have norms over each query and key head has them."""
    norm_gate_rank: int = 0
    """The inner width of the gates on norms (A.X K2); 0 for none."""
    has_head_gates: bool = False
    """Whether a family whose checkpoints may have a gate for each head of attention has them."""
    has_output_norms: bool = False
    """Whether a family whose checkpoints may have norms after mixer and MLP has them."""
    has_layer_norms: bool = False
    """Whether norms subtract the mean before they divide (Ba et al., 2016). Otherwise they are RMS norms."""
    attention_scale: float | None = None
    """Factor on the products of queries and keys; None for `head_dim ** -0.5`."""
    attention_cap: float = 0.0
    """Soft bound of attention's products (`HeadShape.logit_cap`)."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor on what attention and MLP add to the residual stream."""
    logits_scale: float = 1.0
    stream_factors: tuple[tuple[float, float, float, float], ...] = ()
    """Each layer whose norms replace the residual stream (MiniMax) adds the stream and its mixer's result, then the
    stream and its MLP's result; these are the four factors on them. Empty in other families.
    """
    part_scales: PartScales | None = None
    """Factors inside the layers; None if there are none."""
    final_cap: float = 0.0
    """Soft bound of the scaled logits, as `attention_cap`; 0 for none."""

    layer_kv_heads: tuple[tuple[int, int], ...] = ()
    """Number and width of the KV heads of each layer, if layers differ. The width is that of query heads too."""
    layer_num_heads: tuple[int, ...] = ()
    """Number of query heads of each layer, if layers differ."""
    layer_latents: tuple[LatentShape, ...] = ()
    """The shape of latent attention of each layer, if layers differ: then a product of a query and a key has the factor
    `query_dim ** -0.5`.
    """
    kv_sources: tuple[int, ...] = ()
    """The layer whose cached keys and values each layer reads, if some read those of an earlier layer."""
    reader_mlp_factor: int = 1
    """Factor on the inner width of the MLP in layers that read keys and values of another one."""
    value_dim: int | None = None
    """Width of a value, if it is narrower than a key (MiMo-V2). Cached values are filled up with zeros."""
    value_scale: float = 1.0
    """Factor on values."""
    values_are_projected_keys: bool = False
    """Whether layers without a window make values of the weights of the keys (Gemma 4)."""
    per_layer_size: int = 0
    """Width of the inputs that each layer has of its own (Gemma 4); 0 for none."""
    per_layer_vocab_size: int = 0
    """Rows of the table of these inputs. Tokens after the last one have the first row."""
    shared_blocks: SharedBlocks | None = None
    """The blocks before recurrent mixers; None if there are none."""
    streams: StreamsConfig | None = None
    """The residual streams; None for one."""
    connections: HyperConnections | None = None
    """The residual streams and how parts of layers read and write them; None for one stream, or for `streams`."""
    num_gated_streams: int = 1
    """Residual streams, whose gated norms are averaged for each part of a layer, and which share its result by weights
    of their own (Qwen4-Exp); 1 for one stream.
    """
    ngrams: NgramShape | None = None
    """Tables of n-grams whose rows layers add to these streams; None for none."""
    num_unused_layers: int = 0
    """Layers that the checkpoint has after the last: draft heads, which are no part of the model."""
    num_trial_layers: int = 1
    """Number of first layers among which is one of every kind. A trial of the model runs so many."""
    is_draft_head: bool = False
    """Whether this is the draft head of a model (`draft_heads.py`), which reads hidden states of the model."""
    eagle3: Eagle3Shape | None = None
    """What a draft head reads between the model's layers; None if it reads the final hidden states, or is none."""
    taps: tuple[int, ...] = ()
    """The layers before which the residual stream is given out, beside the final hidden states; ascending. The number
    of layers stands for the stream after the last one.
    """

    @property
    def heads(self) -> HeadShape:
        scale = self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
        latent_dim = 0 if self.latent is None else self.latent.kv_rank
        if self.compressed is not None:
            latent_dim = self.compressed.head_dim
        return HeadShape(self.num_heads, self.num_kv_heads, self.head_dim, scale, self.attention_cap, latent_dim)

    def heads_of(self, layer: int) -> HeadShape:
        """Returns the heads of a layer."""
        heads = self.heads
        if self.layer_num_heads:
            heads = heads._replace(num_heads=self.layer_num_heads[layer])
        if self.layer_latents:
            latent = self.layer_latents[layer]
            heads = heads._replace(latent_dim=latent.kv_rank, scale=latent.query_dim**-0.5)
        if not self.layer_kv_heads:
            return heads
        num_kv_heads, head_dim = self.layer_kv_heads[layer]
        return heads._replace(num_kv_heads=num_kv_heads, head_dim=head_dim)

    @property
    def largest_heads(self) -> HeadShape:
        """The heads of a layer that caches the most, as much as every layer has room for. A block indexer's key has
        the room of one more head.
        """
        if self.block_indexer is not None:
            return self.heads._replace(num_kv_heads=self.num_kv_heads + 1)
        layers = range(self.num_layers) if self.layer_kv_heads else range(1)
        return max(map(self.heads_of, layers), key=lambda heads: (heads.num_kv_heads * heads.head_dim, heads))

    @property
    def num_tokens_read(self) -> int:
        """Number of tokens that have an embedding."""
        return self.vocab_size if self.eagle3 is None else self.eagle3.target_vocab_size

    @property
    def num_cached_layers(self) -> int:
        """Number of layers that have a KV cache of their own."""
        return len(set(self.kv_sources)) or sum(self.attends)

    @property
    def num_cached(self) -> int:
        """Number of tensors that a layer caches: keys and values, or only the vectors that are both."""
        return 1 if self.heads.keys_are_values else 2

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """The rope of each layer; None for a layer without positions."""
        return self.layer_ropes or (self.rope,) * self.num_layers

    @property
    def attends(self) -> tuple[bool, ...]:
        """Whether each layer has attention."""
        return self.layer_attends or (True,) * self.num_layers

    @property
    def states(self) -> tuple[StateShape | None, ...]:
        """The recurrent state of each layer; None for a layer without one."""
        return self.layer_states or (None,) * self.num_layers

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of one sequence in all layers; 0 if no layer has one."""
        return sum(state.num_bytes for state in self.layer_states if state is not None)

    def first_layers(self, num_layers: int) -> ModelConfig:
        """Returns the same model with its first layers only."""
        return msgspec.structs.replace(
            self,
            num_layers=num_layers,
            sliding_windows=self.sliding_windows[:num_layers],
            layer_ropes=self.layer_ropes[:num_layers],
            layer_kv_heads=self.layer_kv_heads[:num_layers],
            layer_num_heads=self.layer_num_heads[:num_layers],
            layer_latents=self.layer_latents[:num_layers],
            kv_sources=self.kv_sources[:num_layers],
            layer_states=self.layer_states[:num_layers],
            layer_attends=self.layer_attends[:num_layers],
            stream_factors=self.stream_factors[:num_layers],
        )

    def for_context(self, max_model_len: int | None) -> ModelConfig:
        """Returns the same model, whose ropes are scaled for sequences of at most `max_model_len` tokens; None for the
        longest context.
        """
        longest = min(max_model_len or self.max_position_embeddings, self.max_position_embeddings)
        scaled = [
            rope and msgspec.structs.replace(rope, longest_context=longest) for rope in (self.rope, *self.layer_ropes)
        ]
        return msgspec.structs.replace(self, rope=scaled[0] or self.rope, layer_ropes=tuple(scaled[1:]))

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Returns the bytes of KV cache that one token takes over all layers with attention, in a dtype of
        `DTYPE_BYTES` or `ROUNDED_KV_BITS`.
        """
        return self.num_cached_layers * self.layer_bytes_per_token(dtype)

    def layer_bytes_per_token(self, dtype: str) -> int:
        """Returns the bytes of KV cache that one token takes in one layer."""
        _, num_kv_heads, head_dim, *_ = self.largest_heads
        return self.num_cached * num_kv_heads * kv_head_bytes(dtype, head_dim)
