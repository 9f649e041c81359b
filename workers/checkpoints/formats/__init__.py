"""Readers of quantised weights, one module for each family of formats: tensors as stored -> integers in groups."""
