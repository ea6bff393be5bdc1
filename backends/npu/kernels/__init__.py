"""Kernels of the NPU, which implement hal's operations with torch_npu's."""
