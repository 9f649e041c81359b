"""Executors run the steps that an engine plans: the contract, an executor in this process, and a
thread around another.
"""
