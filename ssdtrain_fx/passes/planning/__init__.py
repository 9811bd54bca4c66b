"""Planning: numbers in, plan out. It does not see the graph."""
