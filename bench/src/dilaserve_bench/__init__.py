"""Benchmarks, and the training of the bundled tiny model."""
