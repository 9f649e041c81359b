"""docs/options.md lists every option of the configuration as it is."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from manta.cluster.cli.options_page import page
from manta.cluster.config import ServeConfig
from manta.cluster.option_docs import option_text
from manta.cluster.option_reader import read_options
from tests.house.pages import ROOT
from tests.house.test_options import options


class Options(msgspec.Struct):
    count: Annotated[int, Meta(ge=1, le=1000)] | None = None
    """Things that there are. None is any number."""
    choice: Literal["a", "b"] = "a"
    names: tuple[str, ...] = ()
    shares: dict[str, float] = {}


ROWS = dict(re.findall(r"(?m)^\| `([\w.\[\]]+)` \| (.*) \|$", page()))


def test_the_options_page_is_up_to_date() -> None:
    again = "python -m manta.cluster.cli.options_page > docs/options.md"
    assert (ROOT / "docs" / "options.md").read_text() == page(), again


def test_every_option_has_a_row_with_a_meaning() -> None:
    assert {key.split(".")[-1] for key in ROWS} >= set(options(ServeConfig))
    for key, row in ROWS.items():
        values, default, meaning = row.split(" | ")
        assert values, key
        assert default, key
        assert meaning.endswith((".", ":")), f"{key}: {meaning}"


@pytest.mark.parametrize("key", [key for key in ROWS if "NAME" not in key and "[0]" not in key])
def test_each_key_of_the_page_has_that_default(key: str) -> None:
    """The default is read as a user would give it, and changes nothing."""
    shown = ROWS[key].split(" | ")[1].strip("`").replace(",", "" if "[" not in ROWS[key] else ",")
    group, _, name = key.rpartition(".")
    values: dict[str, object] = {name: msgspec.yaml.decode(shown)}
    for part in reversed(group.split(".") if group else []):
        values = {part: values}
    optional = next((name for name in ("speculative", "kv_events") if name in group), None)
    plain = {} if optional is None else {"engine": {optional: {}}}
    plain = {"autoscaling": {}} if "autoscaling" in group else plain
    assert read_options(values, ServeConfig) == read_options(plain, ServeConfig)


def test_types_bounds_and_defaults_are_told_in_words() -> None:
    told = {field.name: option_text(Options, field.name) for field in msgspec.structs.fields(Options)}
    assert {name: (text.type_name, text.values) for name, text in told.items()} == {
        "count": ("integer or null", "at least 1, at most 1,000"),
        "choice": ("text", "a, b"),
        "names": ("list of text", ""),
        "shares": ("mapping of names to number", ""),
    }
    assert told["shares"].default == {}
