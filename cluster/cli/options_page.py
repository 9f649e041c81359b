"""Writes the page of the manual with every option: `python -m manta.cluster.cli.options_page > docs/options.md`.

The page is made from the configuration's own structs (`cluster/config.py`), and a test checks that it is up to date.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from manta.cluster.cli.flags import FLAGS
from manta.cluster.config import ServeConfig
from manta.cluster.option_docs import OptionText, group_of, option_text
from manta.structured.visible_text import pass_on

HEAD = """# Options

This page is generated from the configuration's source: `python -m manta.cluster.cli.options_page > docs/options.md`.
[Serving](serve.md), [models](models.md), [clusters](clusters.md) and [operating](operate.md) explain the options that
belong together.

An option is a key of a YAML file, which `--config FILE` names, or of the command line:

```bash
manta serve --set engine.max_num_sequences=64 --set port=8001
```

- A dot separates a group from its option. In YAML groups are nested mappings.
- `LLM(...)` and Serve's `args` take the same options; `LLM` takes those below `engine.` without the prefix.
- An option whose name ends in `_bytes` may be a size such as `512MiB` or `1GB`.
- Names that end in `_s` or `_seconds` are in seconds.
- An unknown key, a wrong type or a value out of bounds is refused before anything starts.
"""
FLAG_OF = {option: flag for flag, option in FLAGS.items()}


def page() -> str:
    """Returns the page in Markdown: a table for each group of options."""
    return "\n".join([HEAD, *_tables(ServeConfig, "", {})]) + "\n"


def _tables(kind: type[msgspec.Struct], prefix: str, shown: dict[type[msgspec.Struct], str]) -> Iterator[str]:
    """Yields the lines of a group and of the groups in it. `shown` holds the groups that have a table, by their keys: a
    second place with the same options is told in a row.
    """
    names = [field.name for field in msgspec.structs.fields(kind)]
    groups = {name: found for name in names if (found := group_of(kind, name)) is not None}
    yield f"## `{prefix.rstrip('.')}`\n" if prefix else "## The server\n"
    yield f"{_summary(kind)}\n"
    yield "| option | type, values | default | meaning |"
    yield "| --- | --- | --- | --- |"
    texts = {name: option_text(kind, name) for name in names}
    keys = {name: _key_below(prefix + name, texts[name]) for name in groups}
    for name in names:
        if name not in groups or keys[name] != prefix + name:
            yield _row(prefix + name, texts[name])
        elif groups[name] in shown:
            meaning = texts[name].full_doc
            yield f"| `{prefix}{name}` | options, as `{shown[groups[name]]}` | `{{}}` | {meaning} |"
    yield ""
    for name in sorted(groups, key=lambda name: keys[name].endswith("]")):  # lists repeat groups of the only model
        if groups[name] not in shown:
            shown[groups[name]] = keys[name]
            yield from _tables(groups[name], f"{keys[name]}.", shown)


def _key_below(key: str, text: OptionText) -> str:
    """Returns the key below which the options of a group stand, with a word for the operator's names or an index."""
    if text.type_name.startswith("mapping"):
        return f"{key}.NAME"
    return f"{key}[0]" if text.type_name.startswith("list") else key


def _summary(kind: type[msgspec.Struct]) -> str:
    """Returns the first paragraph of a struct's docstring."""
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def _row(key: str, text: OptionText) -> str:
    values = f"{text.type_name}; {text.values}" if text.values else text.type_name
    flag = f" Flag: `{FLAG_OF[key]}`." if key in FLAG_OF else ""
    meaning = re.sub(r"\bNone\b", "null", text.full_doc)
    return f"| `{key}` | {values} | {_shown(text.default)} | {meaning}{flag} |"


def _shown(default: Any) -> str:
    if isinstance(default, bool) or default is None:
        return {None: "null", True: "true", False: "false"}[default]
    if isinstance(default, int | float):
        return f"{default:,}"
    return f"`{msgspec.json.encode(default).decode()}`"


if __name__ == "__main__":
    pass_on(page())
