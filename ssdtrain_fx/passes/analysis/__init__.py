"""Analysis: reads a graph and returns frozen values: liveness, costs, candidates, and the planning problem."""
