"""One request and its answer, and the state that all endpoints share."""
