"""What a step needs and in which order: axes, slots, declarations, plans, buffers and fills."""
