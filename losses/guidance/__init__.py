"""Papers that bring hints, demonstrations or experts into the update."""
