"""Where graph and numbers meet: poses the placement problem for a graph and names every decision in a plan."""
