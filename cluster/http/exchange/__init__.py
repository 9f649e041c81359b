"""One request and its answer, and what all endpoints share."""
