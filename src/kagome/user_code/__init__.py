"""User code beyond the torch calls of a forward: hooks, autograd functions, reads by the host."""
