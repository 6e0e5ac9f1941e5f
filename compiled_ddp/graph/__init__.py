"""Captured graphs: capture, compilation, and one call of a graph inside a step."""
