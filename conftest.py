"""Fixtures that every test may use."""

pytest_plugins = ["dilaserve.testing.fixtures"]
