"""Tests of the command `manta` as a user meets it."""
