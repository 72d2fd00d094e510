"""Evaluation: the HPatches protocol, further tests, baselines, reports."""
