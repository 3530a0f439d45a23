"""Automatic planning: measures a model and a graph once, and predicts what each way to split them costs."""
