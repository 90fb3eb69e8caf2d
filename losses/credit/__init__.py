"""Papers that spread a response's advantage over its tokens."""
