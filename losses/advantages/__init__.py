"""Baselines, normalisation and reward noise: papers that change the advantage of a response."""
