"""Preloaded: importing this does once what each process would else do at its first compiled loop and page.

Where it sits: ``warm`` imports it in the process that all others are forked from. Numba registers its
functions at the first call of a compiled loop, which takes a second. The templates take a third of one.
"""

from __future__ import annotations

from kagome.kernels.base.jit import load_compiler
from kagome.report.rendering import environment

load_compiler()
for name in environment().list_templates():
    environment().get_template(name)
