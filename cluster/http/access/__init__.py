"""Access to the server: keys, origins, addresses and rate limits."""
