"""Importance ratios, clips, trust regions and aggregation: papers that change the surrogate."""
