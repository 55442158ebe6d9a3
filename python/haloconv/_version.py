"""The version, in the one place that both setup.py and the package read."""

__version__ = "0.1.0"
