"""Papers whose contribution is a procedure: selection, rollout, decoding, analysis."""
