"""The command line: train, predict, plan, check, partition, report and doctor."""
