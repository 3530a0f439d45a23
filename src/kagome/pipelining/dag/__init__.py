"""Pipeline parallelism for any module: the stages form a DAG, a batch is split into micro-batches."""
