"""The host's part of sampling: state of sequences, noise, and the verification of drafts."""
