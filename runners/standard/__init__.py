"""The field's declarations, ready to subclass; `slotgraph.standard` shows them."""
