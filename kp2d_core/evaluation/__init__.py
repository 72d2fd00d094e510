"""How good a model is, and against what: the HPatches protocol, baselines, reports."""
