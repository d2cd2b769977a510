"""Serving a model some of whose layers see a window only: two KV pools, and one graph's fast way into each."""
