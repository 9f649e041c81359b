"""Where the model runs: in this process, a step at a time or one behind another."""
