"""Projection: what training would take on machines that one does not have."""
