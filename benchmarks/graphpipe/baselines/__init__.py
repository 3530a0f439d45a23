"""Baselines: the stage planners of the papers that GraphPipe is compared with."""
