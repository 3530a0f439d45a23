"""How to split: what layers, devices and links cost, and the plans that follow. Loads no torch."""
