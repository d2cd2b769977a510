"""What a loop of steps hands out."""
