"""Constraints on outputs: what a request may ask for, how it is proved, and how masks are filled."""
