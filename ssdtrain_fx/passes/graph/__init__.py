"""What a graph says: the scheduled joint graph, its nodes, its ops, and which of them share a storage."""
