"""The version of the package, which checkpoints name."""

__version__ = "0.2.0"
