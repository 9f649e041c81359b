"""Writes the page of the manual with the flags of other servers: `python -m manta.cluster.cli.flags_page >
docs/flags.md`.

The page is made from `cluster/cli/flags.py`, and a test checks that it is up to date.
"""

from __future__ import annotations

from manta.cluster.cli.flags import ANSWERS, FLAGS, VALUES
from manta.structured.visible_text import pass_on

HEAD = """# Coming from vLLM or llama.cpp

This page is generated from the flags' source: `python -m manta.cluster.cli.flags_page > docs/flags.md`.

`manta serve` and `manta check` know the flags of the first table by the names that vLLM has. A flag of the second table
is refused in the words beside it. Every [option](options.md) can be set with `--set`, or in a file that `--config`
names.

"""


def page() -> str:
    """Returns the page in Markdown: a table of the flags that exist here, and one of those that do not."""
    here = [f"| `{flag}` | [`{option}`](options.md){_values(option)} |" for flag, option in sorted(FLAGS.items())]
    elsewhere = [f"| `{flag}` | {answer} |" for flag, answer in sorted(ANSWERS.items())]
    first = ["| flag | option that it sets |", "| --- | --- |", *here, ""]
    return HEAD + "\n".join([*first, "| flag | here |", "| --- | --- |", *elsewhere, ""])


def _values(option: str) -> str:
    """Returns what vLLM's values of an option mean."""
    return "".join(f"; `{theirs}` means `{ours}`" for theirs, ours in VALUES.get(option, {}).items())


if __name__ == "__main__":
    pass_on(page())
