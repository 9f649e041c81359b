"""The command `manta`."""
