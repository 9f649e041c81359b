"""JSON schemas rewritten exactly, so that a grammar backend which lacks a keyword can serve it all the same."""
