"""What all kernels share: compressed sparse rows, the thread pool and the reference in plain PyTorch."""
