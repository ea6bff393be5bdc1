"""The compiler npugraph_ex, which lowers a step to torch_npu's operations and compiles it with torchair."""
