"""Tests of the offline `LLM` of `cluster/llm.py`."""
