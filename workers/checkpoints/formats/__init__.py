"""Readers of quantised weights, one module for each family of formats. They return integers in groups."""
