"""Date and time formats as exact regular expressions, because the backends' own let impossible dates through.

RFC 3339, section 5.6, with years 0001 to 9999, the days that each month has, and no leap seconds.
"""

from __future__ import annotations

from typing import Any

_YEAR = r"(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DAY_OF_ANY_YEAR = (
    r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP_YEAR = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"({_YEAR}-{_DAY_OF_ANY_YEAR}|{_LEAP_YEAR}-02-29)"
_HOUR_MINUTE = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_HOUR_MINUTE})"

PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}


def with_exact_formats(schema: Any) -> Any:
    """The schema with these formats written as patterns. A format in a schema that also has a `pattern` stays."""
    if isinstance(schema, list):
        return [with_exact_formats(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {
        name: value if name in ("const", "enum", "default", "examples") else with_exact_formats(value)
        for name, value in schema.items()
    }
    name = result.get("format")
    if isinstance(name, str) and name in PATTERNS and "pattern" not in result:
        result["pattern"] = PATTERNS[name]
        del result["format"]
    return result
