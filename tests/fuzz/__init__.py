"""Fuzz: valid inputs of many kinds, altered at random, must be served sanely or refused in one sentence.

Where it sits: ``python -m tests.fuzz --help``; ``test_fuzz.py`` runs a few cases of each kind. A kind is a
class in a file ``kind_*.py`` of this folder, which lists its kinds in ``KINDS``; see ``harness.Kind``.
"""
