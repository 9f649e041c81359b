"""Autoscaling: engines are started and stopped with the load."""
