"""Recurrent mixers: layers that combine tokens by a state of fixed size instead of by keys and values."""
