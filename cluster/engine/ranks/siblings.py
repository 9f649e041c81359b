"""Whether other engines of the same deployment run beside the one in this process."""

from __future__ import annotations

import ray
import ray.util

SERVE_NAMESPACE = "serve"
"""Ray namespace of Serve's actors."""


def has_siblings() -> bool:
    """Returns whether Serve's replica in this process has others of its deployment beside it. Their actors' names
    differ from its own after the last `#`. Returns False outside Serve.
    """
    if not ray.is_initialized() or ray.get_runtime_context().worker.mode != ray.WORKER_MODE:
        return False
    own_name = ray.get_runtime_context().get_actor_name() or ""
    deployment, separator, _ = own_name.rpartition("#")
    actors = ray.util.list_named_actors(all_namespaces=True) if separator else []
    named = {each["name"] for each in actors if each["namespace"] == SERVE_NAMESPACE}
    return any(name.startswith(f"{deployment}#") and name != own_name for name in named)
