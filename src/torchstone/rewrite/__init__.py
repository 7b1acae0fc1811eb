"""Proven rewrites of a captured graph: rules, how they are found, weighed and applied."""
