"""Hyper-connections as the families describe them. `workers/decoders/hyper_connections.py` computes them."""

from __future__ import annotations

from manta.workers.models.model_config import ModelConfig
from manta.workers.models.part_shapes import HyperConnections
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, LayerSpec
from manta.workers.models.weight_specs import ConnectionSpec, Split, TensorSpec


def read_mixed_streams(raw: RawConfig) -> HyperConnections:
    """Reads the shape of manifold-constrained hyper-connections (mHC)."""
    return HyperConnections(
        num_streams=raw["hc_mult"].whole(4, most=64),
        eps=raw["hc_eps"].number(1e-6, least=0, most=1),
        mixing_steps=raw["hc_sinkhorn_iters"].whole(20, most=1000),
    )


def with_connections(config: ModelConfig, spec: DecoderSpec) -> DecoderSpec:
    """Returns the same model, whose parts read and write several residual streams."""
    return spec._replace(
        layers=[_with_connections(config, layer, index) for index, layer in enumerate(spec.layers)],
        gathering=_connection(config, "model.hc_head.hc_", num_kinds=1),
    )


def _with_connections(config: ModelConfig, layer: LayerSpec, index: int) -> LayerSpec:
    assert config.connections is not None
    num_kinds = 3 if config.connections.mixing_steps else 2
    mixer, mlp = (_connection(config, f"model.layers.{index}.{name}_hc.", num_kinds) for name in ("attn", "ffn"))
    return layer._replace(connections=(mixer, mlp))


def _connection(config: ModelConfig, prefix: str, num_kinds: int) -> ConnectionSpec:
    """Returns the weights of a part with shares of so many kinds: for reading, writing and mixing."""
    assert config.connections is not None
    count = config.connections.num_streams
    num_shares = sum([count, count, count * count][:num_kinds])
    return ConnectionSpec(
        TensorSpec(f"{prefix}fn", (num_shares, count * config.hidden_size), Split.NOTHING),
        TensorSpec(f"{prefix}base", (num_shares,), Split.NOTHING),
        TensorSpec(f"{prefix}scale", (num_kinds,), Split.NOTHING),
        count,
    )
