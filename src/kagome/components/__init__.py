"""Components of a training run that every engine shares."""
