"""CPU dispatch: the kernels for float32 and float64 on a CPU, compiled by numba on their first call.

Where it sits: ``kernels.ops`` imports it for the first such tensor. The machine code is kept on disk, so that
only the first process of an installation compiles.
"""

# ruff: noqa: F401  ``kernels.ops`` looks each of them up by its name.
from __future__ import annotations

from kagome.kernels.cpu.attention import attention_sum, attention_sum_back, fuses
from kagome.kernels.cpu.edges import add_rows, gather, join_edges, join_edges_back, sum_edges
from kagome.kernels.cpu.gatv2_scores import leaky_dots, leaky_dots_back
from kagome.kernels.cpu.min_max import (
    column_softmax,
    column_softmax_back,
    extreme_back,
    extreme_edges,
    extreme_edges_back,
    extreme_rows,
)
from kagome.kernels.cpu.softmax import softmax_edges, softmax_edges_back, softmax_sum, softmax_sum_back
from kagome.kernels.cpu.spmm import dot_edges, sum_rows
