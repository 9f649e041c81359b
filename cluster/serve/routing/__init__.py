"""The request router: it chooses an engine by load and cached prefixes."""
