"""Handles: the owners, tokens and tickets that stand for tensors in a graph."""
