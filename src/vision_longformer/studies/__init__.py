"""The paper's comparisons by one command, with seeds and error bars.

A study flows through ``catalogue.py`` (what is compared), ``planning.py`` (what is to be run, and its cost),
``runner.py`` (processes, here or through Slurm, each a ``job.py``), ``results.py`` (JSON), ``report.py`` with
``statistics.py`` (the table) and ``plots.py``.
"""
