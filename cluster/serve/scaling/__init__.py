"""Autoscaling: starts and stops engines with the load."""
