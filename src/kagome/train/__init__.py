"""One rank's work: data, engines, epochs."""
