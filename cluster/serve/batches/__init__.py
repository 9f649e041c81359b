"""The deployment that runs batches over the engines."""
