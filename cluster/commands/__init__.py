"""The subcommands of `manta`, one module each; `cluster/cli.py` is the only caller."""


class Refusal(Exception):
    """Something that the user can mend. The message is one paragraph with the value, the bound and the remedy."""
