"""Random cases against the plain engine, and the tests that run some of them."""
