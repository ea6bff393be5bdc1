"""An emulator of CUDA: runs the installed CUDA build of torch without a GPU.

``src/runtime`` implements libcudart: memory, streams, events, captures and graphs. ``src/operations`` computes torch's
CUDA kernels with its CPU kernels. :mod:`.kernels` computes the kernels that are launched from Python: Triton's in
Triton's interpreter, flash attention, and FlashInfer's.

``emulated-cuda COMMAND`` runs a command on the emulator. The README says what it covers and what it cannot cover.
"""
