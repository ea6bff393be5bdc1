"""Scripts for torch_npu that do not use the emulator's API."""
