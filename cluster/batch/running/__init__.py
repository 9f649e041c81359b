"""The runner of batches: it answers each line once, whatever dies."""
