"""Executors run the steps that an engine plans: the contract, the one in this process, and a thread around another one.
"""
