"""Numbers in, plan out: the placement problem, its simulation and its solvers. Knows no graph."""
