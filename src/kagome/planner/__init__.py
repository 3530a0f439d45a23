"""Planner: predicts what each way to split a training costs, and searches for the best; loads no torch."""
