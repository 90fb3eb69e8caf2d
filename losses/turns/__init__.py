"""Papers for multi-turn responses and agents."""
