"""Constraints: what a request may ask for, who proves it, and who fills the masks of its tokens."""
