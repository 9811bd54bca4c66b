"""Studies: the demo, the benchmark, the recompute-offload-keep curve, their pictures and their models."""
