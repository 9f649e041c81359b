"""The device seam, and the state of sequences that the worker of every framework shares."""
