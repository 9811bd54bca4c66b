"""Graph changes, one per file, and the verifier that checks the rewritten graph."""
