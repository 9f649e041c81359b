"""The adapters that compute a request: the one that its model names, those of its field `lora`, or what the operator
applies.
"""

from __future__ import annotations

from collections.abc import Sequence

from manta.cluster.engine.adapter_table import AppliedAdapter
from manta.cluster.errors import refuse
from manta.cluster.http.access.request_admission import Caller
from manta.cluster.http.exchange.state import AppState
from manta.cluster.protocol.adapter_scales import AdapterScale, all_scaled
from manta.workers.adapter_key import AdapterKey, text_of

_AND = "+"


async def chosen_adapter(
    state: AppState, model: str | None, scales: Sequence[AdapterScale] | None, caller: Caller
) -> tuple[str, str]:
    """Returns the name and the key of the adapter that computes a request; both are empty for the model alone, and
    several adapters have their names together. Refuses a name that nothing is served under, and scales of adapters that
    the caller may not use.
    """
    name = state.admission.check_model(model)
    chosen = [AppliedAdapter(name, 1.0)] if name else []
    if scales is not None:
        if name:
            remedy = "leave lora out, or name the model itself"
            refuse("excludes", "lora", bound=f"the adapter {name!r} as the model", remedy=remedy)
        chosen = scaled_adapters(state, scales, "lora", caller)
    elif not name and state.loaded_adapters is not None:
        applied = state.loaded_adapters.applied
        chosen = [each for each in applied if each.name in state.admission.names.adapters]
    keys = [AdapterKey(await state.adapter_digest(each.name), each.scale) for each in chosen]
    return names_of(chosen), text_of(keys)


def scaled_adapters(
    state: AppState, scales: Sequence[AdapterScale], field: str, caller: Caller | None
) -> list[AppliedAdapter]:
    """Returns the adapters whose scale is not 0, in the order of their ids, which are places in the model's list of
    adapters. Refuses ids that are none, or that a `caller` may not use, and several adapters together where engines
    keep none.
    """
    names = state.admission.names
    usable = {
        number: name for number, name in enumerate(names.adapters) if caller is None or caller.may_use(names, name)
    }
    for place, each in enumerate(scales):
        if each.id not in usable:
            refuse("unknown_value", f"{field}[{place}].id", each.id, tuple(usable) or "none, for there is no adapter")
    ordered = sorted(all_scaled(scales, field), key=lambda each: each.id)
    found = [AppliedAdapter(usable[each.id], each.scale) for each in ordered]
    if len(found) > 1 and state.loaded_adapters is None:
        cause, remedy = "this server has one adapter at a time", "set engine.adapter_roots"
        refuse("unsupported", field, remedy=remedy, cause=cause)
    return found


def names_of(adapters: Sequence[AppliedAdapter]) -> str:
    """Returns the names of adapters that act together, for logs and metrics; empty for none."""
    return _AND.join(each.name for each in adapters)
