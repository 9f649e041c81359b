"""Tokens from an engine to an ingress, and runs that outlive their engine."""
