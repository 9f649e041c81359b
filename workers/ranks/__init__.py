"""The device seam, and what the worker of every framework keeps of its sequences."""
