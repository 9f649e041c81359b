"""Who runs a model's layers: Manta's decoder, or transformers' own code over the paged cache."""
