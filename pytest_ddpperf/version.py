"""The version of this package, which its own modules import from here: the package's top imports
some of them."""

__version__ = "0.1.0"
