"""A device ``cuda:N`` and a process group with NCCL's rules, for machines without a GPU.

Where it sits: the tests of this folder run Kagome's device path on it. ``docs/gpu.md`` says what it is.

::

    build.py     device.cpp ──g++──> build/fake_gpu/HASH.so, once
    cuda.py      start(): loads it, and answers what torch.cuda and torch.accelerator are asked
    nccl.py      start(): torch makes groups of backend "nccl" that keep NCCL's rules
    waits.py     counts where the host waits for the device
"""
