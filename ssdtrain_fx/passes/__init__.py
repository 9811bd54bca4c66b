"""Passes: rewrite graphs; the pipeline lists them. They use no files and no streams."""
