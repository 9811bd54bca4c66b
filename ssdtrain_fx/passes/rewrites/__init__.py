"""Rewrites: change the graph, one change per file, and verify the result."""
