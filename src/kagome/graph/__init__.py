"""What we train on: data sets, their structure, and the ways to cut a graph by vertices."""
