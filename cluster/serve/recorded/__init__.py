"""Recorded streams, which survive the loss of the client's connection and of the ingress that runs them."""
