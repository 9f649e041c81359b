"""The version of Manta, as it was installed."""

from importlib import metadata


def version() -> str:
    """`0` in a checkout that was never installed."""
    try:
        return metadata.version("manta")
    except metadata.PackageNotFoundError:
        return "0"
