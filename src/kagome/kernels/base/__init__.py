"""What all kernels share: the edges in compressed rows, threads, and the same in plain PyTorch."""
