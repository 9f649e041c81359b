"""Speculative decoding: proposers, draft lengths, and the worker that speculates around another one."""
