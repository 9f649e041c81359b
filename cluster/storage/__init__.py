"""Files, batches and responses of clients, in a folder or an object store."""
