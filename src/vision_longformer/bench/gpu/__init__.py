"""What the Triton kernels would do on GPUs that need not be there: compiled, disassembled, counted, predicted.

``layer.py`` is the call that is looked at, ``compile.py`` compiles its kernels, ``interpret.py`` counts the work of a
program of each, ``sass.py`` reads machine code, ``chips.py`` knows the hardware, ``report.py`` predicts from it, and
``measure.py`` times the same call where there is a GPU.
"""
