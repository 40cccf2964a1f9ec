"""Benchmarks: how fast and how lean the implementations and models are on this machine, and how sure we can be.

``plans.py`` says what is measured, ``run.py`` measures it with the help of worker processes, ``result.py`` keeps,
saves and compares what came out, ``plots.py`` draws it. Nothing here is imported by the rest of the package.
"""
