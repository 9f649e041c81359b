"""Pages of lists: a client goes on behind the last id of a page, until a page says that there is no more."""

from __future__ import annotations

import re

from manta.cluster.errors import refuse


def page_of(ids: list[str], after: str | None, limit: int, these: str) -> tuple[list[str], bool]:
    """Returns the ids that follow `after`, at most `limit`, and whether there are more. Ids differ from each other.

    Raises `RequestRefused` if `after` is not among the ids of `these`.
    """
    if after is not None:
        if after not in ids:
            refuse("names_nothing", "after", after, these, "give the last_id of a page")
        ids = ids[ids.index(after) + 1 :]
    return ids[:limit], len(ids) > limit


def page_by_age(
    ids: list[str], after: str | None, limit: int, form: re.Pattern[str], is_ascending: bool = False
) -> tuple[list[str], bool]:
    """Returns the same of ids that sort by age, latest first unless `is_ascending`. The object `after` may be gone
    since, because clients delete what they have read.

    Raises `RequestRefused` if `after` is not an id of this `form`.
    """
    if after is not None:
        if not form.fullmatch(after):
            refuse("names_nothing", "after", after, "the ids in this list", "give the last_id of a page")
        ids = [each for each in ids if (each > after if is_ascending else each < after)]
    ids = sorted(ids, reverse=not is_ascending)
    return ids[:limit], len(ids) > limit
