"""Reads a checkpoint into JAX arrays that are sharded over a mesh.

The descriptions of `workers/models/`, which the torch worker reads too, list the tensors. `WeightReader` reads each.
"""

from __future__ import annotations

import pathlib

import jax
from jax.sharding import Mesh

from manta.workers.checkpoints.tensor_files import TensorFiles
from manta.workers.checkpoints.unread_tensors import check_all_used
from manta.workers.decoders.rope_table import rope_table
from manta.workers.jax_worker.layer_arrays import (
    AttentionArrays,
    ExpertsArrays,
    GatedMlpArrays,
    LatentArrays,
    Layer,
    LinearArrays,
    MixerArrays,
    Parameters,
    RecurrentArrays,
    SideBySideArrays,
)
from manta.workers.jax_worker.mesh import AXIS, place
from manta.workers.jax_worker.weight_reader import DTYPES, WeightReader
from manta.workers.load_meter import LOAD_METER
from manta.workers.models.families import describe
from manta.workers.models.latent_specs import LatentAttentionSpec
from manta.workers.models.model_config import ExpertsConfig, ModelConfig, RopeConfig
from manta.workers.models.specs import (
    AttentionSpec,
    ExpertsSpec,
    GatedMlpSpec,
    LayerSpec,
    MixerSpec,
    RecurrentSpec,
    ShortConvSpec,
    SideBySideSpec,
)


def distinct_ropes(config: ModelConfig) -> list[RopeConfig | None]:
    """Returns the ropes of a model's layers, each once; None for layers without positions."""
    return list(dict.fromkeys(config.ropes))


def load_parameters(
    folder: str | pathlib.Path, config: ModelConfig, dtype: str, mesh: Mesh, max_model_len: int, whole: bool = True
) -> Parameters:
    """Loads the weights of a model. Raises `ModelError` naming a missing, misshapen or unexpected tensor.

    If `whole` is False, `config` may have fewer layers than the checkpoint; the others are not read.
    """
    files = TensorFiles(folder)
    if mesh.size == 1:
        files.read_ahead()
    config = files.as_stored(config)
    files.count_into(LOAD_METER)
    reader = WeightReader(files, config, DTYPES[dtype], mesh)
    spec = describe(config)
    embedding = reader.part(spec.embedding, config.hidden_size)
    # In latent attention only the key that rotates has positions, and it lies apart from the latent vector.
    width = config.head_dim if config.latent is None else config.latent.rope_dim
    tables = (rope_table(rope, width, max_model_len) for rope in distinct_ropes(config))
    parameters = Parameters(
        embedding,
        tuple(_layer(reader, config, layer) for layer in spec.layers),
        reader.norm(spec.final_norm),
        LinearArrays(embedding, None) if spec.is_tied else reader.linear(spec.head),
        tuple(place(mesh, table) for table in tables),
    )
    if whole:
        check_all_used(files, config, spec)
    return parameters


def _layer(reader: WeightReader, config: ModelConfig, spec: LayerSpec) -> Layer:
    return Layer(
        reader.optional_norm(spec.input_norm),
        None if spec.mixer is None else _mixer(reader, config, spec.mixer),
        reader.optional_norm(spec.mixer_output_norm),
        reader.optional_norm(spec.mlp_norm),
        _experts(reader, config, spec.mlp) if isinstance(spec.mlp, ExpertsSpec) else _mlp(reader, spec.mlp),
        reader.optional_norm(spec.mlp_output_norm),
    )


def _mixer(reader: WeightReader, config: ModelConfig, spec: MixerSpec) -> MixerArrays:
    if isinstance(spec, SideBySideSpec):
        return SideBySideArrays(_attention(reader, config, spec.attention), _recurrent(reader, spec.recurrent))
    if isinstance(spec, AttentionSpec):
        return _attention(reader, config, spec)
    if isinstance(spec, LatentAttentionSpec):
        return _latent_attention(reader, spec)
    if isinstance(spec, ShortConvSpec):
        tensors = {"kernel": spec.kernel} | ({} if spec.bias is None else {"bias": spec.bias})
        return RecurrentArrays(
            {"input": reader.linears(spec.input)},
            reader.linear(spec.output),
            {name: (reader.tensor(each),) for name, each in tensors.items()},
        )
    assert isinstance(spec, RecurrentSpec), "TPUs refuse compressed attention"
    return _recurrent(reader, spec)


def _attention(reader: WeightReader, config: ModelConfig, spec: AttentionSpec) -> AttentionArrays:
    query, key, value = reader.linears(spec.qkv)
    return AttentionArrays(
        query,
        key,
        value,
        reader.linear(spec.output),
        reader.optional_norm(spec.q_norm),
        reader.optional_norm(spec.k_norm),
        None if spec.sinks is None else reader.vector(spec.sinks, config.num_heads, AXIS),
        None if spec.gate is None else reader.linear(spec.gate),
    )


def _latent_attention(reader: WeightReader, spec: LatentAttentionSpec) -> LatentArrays:
    query, cached = reader.linears(spec.inputs)
    keys, values = reader.linears(spec.expansion)
    assert spec.latent_norm is not None, "only layers with an indexer read the latent vectors of others"
    return LatentArrays(
        query,
        cached,
        reader.optional_norm(spec.query_norm),
        None if spec.queries is None else reader.linear(spec.queries),
        reader.norm(spec.latent_norm),
        keys,
        values,
        reader.linear(spec.output),
        None if spec.gate is None else reader.linear(spec.gate),
    )


def _recurrent(reader: WeightReader, spec: RecurrentSpec) -> RecurrentArrays:
    return RecurrentArrays(
        {name: reader.linears(linear) for name, linear in spec.inputs.items()},
        reader.linear(spec.output),
        {name: tuple(map(reader.tensor, pieces)) for name, pieces in spec.pieces.items()},
    )


def _mlp(reader: WeightReader, spec: GatedMlpSpec | None) -> GatedMlpArrays | None:
    if spec is None:
        return None
    *gate, up = reader.linears(spec.gated)
    return GatedMlpArrays(gate[0] if gate else None, up, reader.linear(spec.down))


def _experts(reader: WeightReader, config: ModelConfig, spec: ExpertsSpec) -> ExpertsArrays:
    assert config.experts is not None
    gated, down = [each.gated for each in spec.experts], [each.down for each in spec.experts]
    *gate, up = (reader.stacked(gated, part) for part in range(len(gated[0].parts)))
    return ExpertsArrays(
        reader.linear(spec.router),
        GatedMlpArrays(gate[0] if gate else None, up, reader.stacked(down, 0)),
        _choice_bias(reader, config.experts, spec),
        _mlp(reader, spec.shared),
        None if spec.shared_gate is None else reader.linear(spec.shared_gate),
    )


def _choice_bias(reader: WeightReader, config: ExpertsConfig, spec: ExpertsSpec) -> jax.Array | None:
    name = spec.choice_bias
    if name is None or (spec.may_lack_choice_bias and not reader.has(name)):
        return None
    return reader.vector(name, config.num_experts)
