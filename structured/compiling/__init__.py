"""Constraints are proved in processes that can be killed."""
