"""Ranks: steps that several processes run together, over process groups of torch.distributed."""
