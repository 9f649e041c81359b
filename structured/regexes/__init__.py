"""Regular expressions of requests: what grammar backends lack of them is written in what they have."""
