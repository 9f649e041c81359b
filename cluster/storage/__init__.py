"""What clients store: files, batches and responses, in a folder or an object store."""
