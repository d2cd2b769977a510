"""Explaining a runner: what it declares, plans, captured, holds in memory and decided, as data, tables and pictures."""
