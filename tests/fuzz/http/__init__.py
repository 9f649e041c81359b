"""Random clients against a live server."""
