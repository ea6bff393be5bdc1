"""The compiler npugraph_ex: a step as torch_npu's own operations, compiled by torch_npu's torchair."""
