"""The sockets that accept clients' connections."""
