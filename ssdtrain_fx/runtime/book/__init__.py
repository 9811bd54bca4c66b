"""Book: the records of one engine, and the ledger, which changes their state under one lock."""
