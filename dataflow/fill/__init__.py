"""Filling buckets: kinds of sources, bound plans, and the writers of slots."""
