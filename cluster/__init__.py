"""The driver's side of serving: requests, schedules, answers."""
