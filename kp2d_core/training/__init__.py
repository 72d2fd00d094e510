"""Self-supervised training on pairs of views that are made from photographs."""
