"""Which engine gets which request."""
