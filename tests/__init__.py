"""Tests, in folders named after the rooms of the product, and beside them what several folders use."""
