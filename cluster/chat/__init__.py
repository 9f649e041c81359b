"""Chat: templates make a prompt of messages, readers make a message of tokens."""
