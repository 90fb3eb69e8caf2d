"""Papers whose contribution is the reward."""
