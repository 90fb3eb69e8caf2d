"""The shared arithmetic of the objectives: small pure functions, one module a subject."""
