"""The package's version; apart from the package itself, which hands out what is built on it."""

__version__ = "0.1.0"
