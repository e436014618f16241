"""Tests of the policies, one module each."""
