"""Filling buckets: kinds of sources, bound plans, and what writes slots."""
