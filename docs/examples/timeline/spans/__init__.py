"""What a decode step's inputs take of its time, drawn: three ways to run the same step, on one axis of time."""
