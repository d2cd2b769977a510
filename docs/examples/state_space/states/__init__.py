"""A hybrid model, state space and attention, served by continuous batching: each request's state is a row of a pool."""
