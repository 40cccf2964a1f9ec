"""Data that comes with the package: the built-in subset of Fashion-MNIST (see README.md and its licence here)."""
