"""The small objects that stand for offloaded and reloading tensors in a graph: owners, tokens, tickets."""
