"""The loop of steps that are launched ahead of what the host reads."""
