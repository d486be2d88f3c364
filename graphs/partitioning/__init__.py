"""One graph over many devices: its nodes in parts with the edges that enter them, or only its features."""
