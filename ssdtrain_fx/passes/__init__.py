"""FX passes. They work on graphs, storages and plans, and use no files or streams."""
