"""Programs as their users write them for torch_npu."""
