"""OpenAI's bodies: requests, answers and errors."""
