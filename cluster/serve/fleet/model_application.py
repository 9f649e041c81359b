"""The Serve application with the engines of one of several models. Operators deploy some, and the loader (`loader.py`)
others.
"""

from __future__ import annotations

import msgspec
import ray
from ray import serve

from manta.cluster.config import EngineConfig, ServedModel
from manta.cluster.engine.ranks.claims import has_room_for_another
from manta.cluster.serve.engine.engine_deployment import engine_deployment
from manta.cluster.serve.fleet.found import announced
from manta.cluster.serve.starting.placed import placed_engine
from manta.cluster.serve.starting.start_failure import in_words
from manta.structured.constraint import ConstraintError
from manta.structured.visible_logs import logger_of
from manta.structured.vocabulary import Vocabulary
from manta.workers.checkpoints.model_folder import resolve_model_folder
from manta.workers.model_options import ON_DEMAND_PACKED_BYTES
from manta.workers.models.model_config import ModelError

logger = logger_of(__name__)

DRAIN_POLL_S = 0.25
"""Seconds between two checks whether an engine that ends still runs requests. Another model may wait for its memory."""
LOAD_ATTEMPTS = 1
"""Starts of the engines of a model on demand that may fail before it counts as failed. Requests wait for each, and one
that fails takes a place from other models.
"""


def placed_model(model: ServedModel, nodes: list[int]) -> ServedModel:
    """Returns a model as it is deployed on `nodes`, the number of cores of each node. Its name stays. An engine without
    `num_threads` may use all cores of its node and claims none, because models that are idle leave them to the others.
    For those on demand the loader claims them once (`shared_cores.py`). A model on demand keeps its packed weights
    unless its options say otherwise, because it starts again and again.
    """
    engine = model.engine
    if model.on_demand and engine.packed_weights_bytes is None:
        engine = msgspec.structs.replace(engine, packed_weights_bytes=ON_DEMAND_PACKED_BYTES)
    if engine.num_threads is None:
        engine = msgspec.structs.replace(engine, claims_cpus=False)
    placed = placed_engine(engine, model.model_name, model.max_engines, nodes)
    return msgspec.structs.replace(model, name=model.model_name, engine=placed)


def has_one_node() -> bool:
    """Returns whether all engines run on one node, so that this process's interpreter is theirs."""
    return sum(node["Alive"] for node in ray.nodes()) == 1


def check_continues(before: EngineConfig, after: EngineConfig) -> None:
    """Raises `ValueError` if engines of the options `after` cannot go on with what engines of `before` run, because the
    same ids are other tokens to them. Files that this node does not have are not compared.
    """
    if (before.model, before.tokenizer) == (after.model, after.tokenizer):
        return
    try:
        ours, theirs = (_vocabulary(each) for each in (before, after))
    except (ModelError, ConstraintError, OSError) as error:
        logger.warning("whether the tokenizer of %s is another is not known: %s", after.model, in_words(error))
        return
    difference = ours.difference(theirs)
    if difference is not None:
        remedy = "add it under another name, or when the model was removed and its engines have ended"
        raise ValueError(f"{after.model} has another tokenizer ({difference}), and running streams go on; {remedy}")


def _vocabulary(engine: EngineConfig) -> Vocabulary:
    return Vocabulary.load(engine.tokenizer or str(resolve_model_folder(engine.model)), 0, ())


def model_application(placed: ServedModel, address: str, by_loader: bool = False) -> serve.Application:
    """Binds the application with the engines of a model that is placed already. `address` is the name of the
    application that answers its requests, and `by_loader` says whether its loader deploys it.
    """
    is_alone = placed.max_engines == 1
    deployment = engine_deployment(
        placed.engine,
        placed.num_engine_replicas,
        autoscaling=placed.autoscaling,
        is_alone=is_alone,
        is_forked=placed.on_demand and by_loader and has_one_node(),
        starts_new_first=has_room_for_another(placed.engine, placed.max_engines),
    )
    told = announced(address, placed, by_loader)
    deployment = deployment.options(user_config=told, graceful_shutdown_wait_loop_s=DRAIN_POLL_S)
    if placed.on_demand:
        deployment = deployment.options(max_constructor_retry_count=LOAD_ATTEMPTS)
    return deployment.bind(placed.engine, is_alone, placed.on_demand, True)
