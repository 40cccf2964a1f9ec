"""Benchmarks: how fast and how lean the implementations and models are on this machine, and how sure we can be.

A run flows through ``plans.py`` (which cases), ``run.py`` (shares out the time), ``worker.py`` (processes that time
them, by ``timing.py`` and ``memory.py``), ``results.py`` (JSON, comparison) and ``plots.py``. ``gpu/`` predicts what
Triton kernels would do on GPUs.
"""
