"""Regular expressions of ECMA-262: read, found in texts, and written as grammar backends read them."""
