"""Tests of the predictor."""
