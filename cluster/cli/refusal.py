"""The subcommands of `manta`, one module each; `cluster/cli/__main__.py` is the only caller."""


class Refusal(Exception):
    """Something that the user can mend. The message is one paragraph with the value, the bound and the remedy."""

    exit_code = 2


class NotStarted(Refusal):
    """The command passed every check and failed while it started."""

    exit_code = 1
