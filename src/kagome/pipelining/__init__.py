"""Pipeline parallelism: the model's layers in stages over ranks, each part of the graph in chunks."""
