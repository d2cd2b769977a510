"""Steps of which one part, the stack, is captured for buckets of tokens: breaks, rehearsals, captures, and replays."""
