"""Pages of lists: a client goes on behind the last id of a page, until a page says that there is no more."""

from __future__ import annotations

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
