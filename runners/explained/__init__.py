"""Explaining a runner: what it declares, plans, captured, keeps in memory and decided, as data, text and a page."""
