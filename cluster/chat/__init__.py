"""From messages to a prompt, and from tokens to a message with its tool calls and reasoning."""
