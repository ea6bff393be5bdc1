"""How an operation finds its kernel: kernel tables, and kernels that any PyTorch device can use."""
