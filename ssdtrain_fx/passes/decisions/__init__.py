"""Decisions: where graphs and numbers meet. Chooses a plan for a graph, and gives a reason for each storage."""
