"""What the planner learns about this machine: probes that measure it, and the files that keep the results."""
