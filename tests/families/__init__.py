"""Every decoder of the installed transformers as a tiny model: served with transformers' tokens, or refused by name."""
