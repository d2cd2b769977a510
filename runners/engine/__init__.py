"""What runners share: buffers with their fills, routes, graphs, capture, options, outputs and statistics."""
