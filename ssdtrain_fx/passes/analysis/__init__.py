"""Read-only analyses: from a graph to frozen values about liveness, cost, and what may move."""
