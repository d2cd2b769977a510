"""Tests of declarations and runners: assertions, strategies and timers, which the pytest plugin also provides."""
