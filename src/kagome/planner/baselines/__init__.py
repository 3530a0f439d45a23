"""Planners of the papers that GraphPipe is compared with."""
