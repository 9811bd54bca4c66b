"""FX passes: they know graphs, storages and plans, and touch no file and no stream."""
