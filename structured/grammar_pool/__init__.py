"""Grammar workers, as threads or actors: they hold sessions and fill masks during the forward pass."""
