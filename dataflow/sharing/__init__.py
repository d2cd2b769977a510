"""Shared memory: what runners keep in it and when, and where each slot lies, as plans without a device."""
