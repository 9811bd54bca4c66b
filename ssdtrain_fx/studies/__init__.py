"""Programs that compare and draw: the demo, the benchmark, the recompute-offload-keep curve, and their models."""
