"""Manta's decoder, and transformers' own model code over the paged cache."""
