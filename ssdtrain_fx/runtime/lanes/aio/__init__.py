"""Native AIO: the kernel moves CPU tensors, and the ops drive it."""
