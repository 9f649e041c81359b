"""Compilation of constraints in processes that can be killed."""
