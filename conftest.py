"""Fixtures that every test may use: see dilaserve.testing."""

pytest_plugins = ["dilaserve.testing"]
