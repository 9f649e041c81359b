"""Workers, threads or actors, that hold grammar sessions and fill their masks beside the forward pass."""
