"""The adapter that computes a request: the one that its model names, its field `lora`, or what the operator applies."""

from __future__ import annotations

from collections.abc import Sequence

from manta.cluster.errors import refuse
from manta.cluster.http.access.request_admission import Caller
from manta.cluster.http.exchange.state import AppState
from manta.cluster.protocol.adapter_scales import AdapterScale, only_scaled
from manta.workers.adapter_key import AdapterKey


async def chosen_adapter(
    state: AppState, model: str | None, scales: Sequence[AdapterScale] | None, caller: Caller
) -> tuple[str, str]:
    """Returns the name and the key of the adapter that computes a request; both are empty for the model alone. Refuses
    a name that nothing is served under, and scales of adapters that the caller may not use.
    """
    name, scale = state.admission.check_model(model), 1.0
    applied = None if state.loaded_adapters is None else state.loaded_adapters.applied
    if scales is not None:
        if name:
            remedy = "leave lora out, or name the model itself"
            refuse("excludes", "lora", bound=f"the adapter {name!r} as the model", remedy=remedy)
        name, scale = scaled_adapter(state, scales, "lora", caller)
    elif not name and applied is not None and applied.name in state.admission.names.adapters:
        name, scale = applied.name, applied.scale
    return name, AdapterKey(await state.adapter_digest(name), scale).text if name else ""


def scaled_adapter(
    state: AppState, scales: Sequence[AdapterScale], field: str, caller: Caller | None
) -> tuple[str, float]:
    """Returns the name and the scale of the only adapter whose scale is not 0; an empty name if there is none. An id is
    a place in the model's list of adapters. Refuses ids that are none, or that a `caller` may not use.
    """
    names = state.admission.names
    usable = {
        number: name for number, name in enumerate(names.adapters) if caller is None or caller.may_use(names, name)
    }
    for place, each in enumerate(scales):
        if each.id not in usable:
            refuse("unknown_value", f"{field}[{place}].id", each.id, tuple(usable) or "none, for there is no adapter")
    only = only_scaled(scales, field)
    return ("", 1.0) if only is None else (usable[only.id], only.scale)
