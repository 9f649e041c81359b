"""Request logs, spans, and what engines report."""
