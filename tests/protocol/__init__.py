"""Tests of `cluster/protocol`, `cluster/chat` and `cluster/text`: bodies, tools, thinking sections, and text."""
