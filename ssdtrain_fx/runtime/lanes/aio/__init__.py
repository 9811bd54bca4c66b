"""Requests: the kernel moves CPU tensors by native AIO, and the ops drive it."""
