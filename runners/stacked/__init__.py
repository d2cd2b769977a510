"""Steps of which a part, the stack, is captured by token counts: breaks, rehearsals, captures, and replays."""
