"""Kernels of the NPU: hal operations as calls of torch_npu, by generation of the hardware."""
