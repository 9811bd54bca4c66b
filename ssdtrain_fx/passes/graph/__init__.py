"""Graph: what a graph says: the joint graph, its ops, and which values share a storage."""
