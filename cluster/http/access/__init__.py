"""Who may ask: keys, origins, addresses, rates."""
