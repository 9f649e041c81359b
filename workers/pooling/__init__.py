"""Models that pool: a text in, a vector or a score out, over transformers, without a cache and without padding."""
