"""Terms added to a loss."""
