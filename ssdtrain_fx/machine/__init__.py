"""Machine: measures what the planner has to know about this machine, and stores it."""
