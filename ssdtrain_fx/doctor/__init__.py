"""Doctor: checks whether a machine and a directory are suitable for offloading."""
