"""One synchronised backward."""
