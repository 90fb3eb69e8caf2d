"""On-policy distillation and self-distillation."""
