"""The command ``vil``: one small file per command, each a function whose signature and docstring are its interface."""
