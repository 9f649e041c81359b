"""Tokenizers, chat templates, and text from tokens."""
