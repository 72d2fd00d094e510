"""The version of the package; setup.py reads it from this file."""

__version__ = '0.1.0'
