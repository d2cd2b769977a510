"""Who captures and replays: buckets, capture, outputs, decisions and the runners themselves."""
