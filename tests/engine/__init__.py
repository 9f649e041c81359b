"""Tests of the engine: its loop, scheduler, KV blocks and executors, and whatever requests ask of a whole engine."""
