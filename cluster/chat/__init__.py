"""Chats: the prompt that a conversation becomes, and the message that the model's tokens become."""
