"""Request logs, spans, and the reports of engines."""
