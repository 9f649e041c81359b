"""The runner of batches, which answers each line once even if processes die."""
