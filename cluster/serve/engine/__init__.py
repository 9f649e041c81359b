"""One model replica as a Serve deployment."""
