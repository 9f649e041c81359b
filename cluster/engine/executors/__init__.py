"""What runs the steps that an engine plans: the contract, the worker in this process, and a thread around another."""
