"""Differentiable sums, scores and softmaxes over a part's edges."""
