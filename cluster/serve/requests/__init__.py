"""Requests under way in an ingress, and the engines as it calls them."""
