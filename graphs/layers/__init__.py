"""Layers of graph networks, and attention over edges."""
