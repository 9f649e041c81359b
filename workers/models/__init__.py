"""Model families as descriptions: how a configuration is read, which weights there are, how ranks divide them."""
