"""The token channel between engines and ingresses, and the messages that it carries."""
