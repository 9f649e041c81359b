"""One rank of one model replica: its steps, its parameters and its options."""
