"""The driver's side: from a request to its answer."""
