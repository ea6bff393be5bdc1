"""An emulator of CUDA: runs the installed CUDA build of torch without a GPU.

``src/runtime`` implements libcudart: memory, streams, events, captures and graphs. ``src/operations`` computes torch's
CUDA kernels with its CPU kernels. :mod:`.kernels` computes the kernels that are launched from Python: Triton's in
Triton's interpreter, flash attention, and FlashInfer's.

``python -m emulated COMMAND`` runs a command on the emulator, if this folder's parent is on the path. docs/how-to/test-
cuda-without-a-gpu.md says what these tests cover and what they cannot cover.
"""
