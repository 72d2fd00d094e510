"""Synthetic views with known geometry: homographies, light changes, 3D scenes. Without torch."""
