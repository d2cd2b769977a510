"""For suites of declarations and runners: assertions, strategies and races, which the pytest plugin hands out."""
