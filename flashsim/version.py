"""The version number, which setup.cfg also reads."""

__version__ = "0.1.0"
