"""Thresholds: every number by which controllers decide how exact an epoch is, with its reason.

Where it sits: ``precision`` decides by them how rows are exchanged, ``history`` which epochs use history,
``plateau`` whether a model learns at all. None has a source in a paper; each was measured here.

A cosine is that of an approximate gradient and the exact one, at the same weights and draws.
"""

from __future__ import annotations

from typing import Final

# Rows that are encoded, selected or late ----------------------------------------------------------

ROWS_GOOD: Final = 0.9
"""Cosine at which the next probe may come later."""
ROWS_FAIR: Final = 0.5
"""Cosine below which rows are exchanged more exactly; an unbiased gradient may be noisy."""
CODED_FAIR: Final = 0.8
"""The same cosine where a codec is used.

With 0.5 a GAT on Flickr lost 3.7 points on the mean of three seeds, with 0.7 2.4 (two bits at 0.73, then a
gradient three times too long), with 0.8 half a point.
"""
CLOSE: Final = 0.25
"""Length of the gradient's error over the exact gradient's: above it, on the median, rows may not be late.

It lies between what was measured with late rows and no controller in 120 epochs: medians of 0.4 to 0.6 for a
GCN of 3 layers on Squirrel and Flickr, which lost 3 and 10 points, and of 0.3 for GCNII on Squirrel, whose
loss lagged behind; 0.2 and less on Cora, which lost nothing.
"""
RECENT: Final = 3
"""Number of probes whose median is taken: late rows are judged from the first probes on.

They are far off in the first epochs of many runs that they do not harm. With 16 epochs of grace Flickr's GCN
lost 2 to 12 points, because it does not recover, and there the two gradients agree.
"""
LONGEST: Final = 64
"""Most epochs from one probe to the next: a probe costs an epoch, so probes cost 2 % of a long run."""

# Rows of other chunks -----------------------------------------------------------------------------

HISTORY_GOOD: Final = 0.95
"""Cosine at which the next probe may come later; below it epochs are careful.

It is above ``ROWS_GOOD`` because history errs in one direction, epoch after epoch, where a codec's error is
drawn anew each time.
"""
HISTORY_FAIR: Final = 0.85
"""Cosine below which careful epochs are not trusted: errors of history grow from epoch to epoch."""
OFTEN: Final = 4
"""Most careful epochs before a probe; after a bad probe half as many from then on.

While history is good, a probe comes after one period of history, but not before this many epochs.
"""
PAYS: Final = 2
"""Fewest careful epochs between two probes that are worth their probe.

A probe is an epoch with history and an exact one. An exact epoch takes up to twice as long as one with
history, so one careful epoch and its probe take the time of two exact ones or more, and are less exact.
"""

# The loss -----------------------------------------------------------------------------------------

BEGUN: Final = 0.98
"""Share of the first epoch's loss below which a model has begun to learn: less is the noise of a plateau."""
BEGINS: Final = 20
"""Epochs in which a model must begin to learn; after them epochs are exact."""
LEARNS: Final = 0.9
"""Share of the first loss below which history is tried again; a factor more after each fall back."""
BACK: Final = 5
"""A model has fallen back when its loss is half the way back for this many epochs: one may be chance."""
PATIENT: Final = 100
"""Most exact epochs in a row; then as many have history, for a loss that never falls."""
