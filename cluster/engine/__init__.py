"""The step loop of one model replica: schedule, execute, prepare masks, update."""
