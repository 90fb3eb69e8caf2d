"""Preference optimisation on pairs or labels."""
