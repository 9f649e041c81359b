"""Descriptions of model families: how to read a configuration, which weights there are, and how ranks split them."""
