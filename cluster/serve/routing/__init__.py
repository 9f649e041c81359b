"""The request router: it chooses an engine by its load and its cached prefixes."""
