"""The status of a drawn row, and the error messages of failed rows. The samplers of all frameworks use these codes."""

from __future__ import annotations

from manta.workers.sampling_params import SamplingParams
from manta.workers.step import RowError

OK, NAN, INFINITE, MASKED, LATE, OVERFLOW = range(6)
"""The status codes of a row. A row that is not `OK` has token 0.

- `NAN` and `INFINITE` (+inf): the model's own logits are invalid.
- `MASKED`: no token is left.
- `LATE`: the row is not drawn in this step.
- `OVERFLOW`: finite logits became NaN or +inf by the request's parameters or the constraint's adjustments.
"""

_EDITS = ("logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty")
"""Parameters that change the values of logits."""
_DEFAULTS = SamplingParams()


def row_error(status: int, position: int, params: SamplingParams, processors: str = "") -> RowError:
    """Returns the error of a row whose status is neither `OK` nor `LATE`. `processors` names its logits processors."""
    if status == NAN:
        return RowError(f"the model produced NaN logits at position {position}", is_corrupt=True)
    if status == INFINITE:
        return RowError(f"the model produced infinite logits at position {position}", is_corrupt=True)
    if status == OVERFLOW:
        edits = [name for name in _EDITS if getattr(params, name) != getattr(_DEFAULTS, name)]
        if params.constraint is not None:
            edits.append("the constraint")
        return RowError(
            f"a logit leaves the range of float32 at position {position} under {' and '.join(edits)}; "
            "choose values nearer to the defaults",
            is_refusal=True,
        )
    named = f", the logits processors {processors}" if processors else ""
    is_refusal = not processors or _is_restricted(params)
    return RowError(
        f"every token is masked at position {position}: allowed_token_ids, bad_words, min_tokens{named} and "
        "the constraint leave none; loosen one of them",
        is_refusal=is_refusal,
        leaves_none=is_refusal,
    )


def _is_restricted(params: SamplingParams) -> bool:
    """Returns whether request parameters other than logits processors mask tokens.

    A logits processor that masks every token by itself is the operator's fault. A request that combines it with such
    parameters chose both.
    """
    return bool(params.is_masked or params.allowed_token_ids or params.bad_words_token_ids or params.min_tokens)
