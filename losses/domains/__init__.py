"""Papers of one domain whose objective is their own."""
