"""Tests of constraints: backends, compile processes, the grammar pool and its caches."""
