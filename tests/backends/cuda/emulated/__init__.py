"""CUDA without a GPU: the build of torch for CUDA, as it is installed, on a runtime and kernels that are emulated.

``src/runtime`` is libcudart: memory, streams, events, captures and graphs as CUDA has them, of which
``src/operations`` computes torch's kernels by those for the CPU. :mod:`.kernels` computes those in Python: Triton's in
Triton's interpreter, flash attention, and FlashInfer's.

``python -m emulated COMMAND`` runs a command so, with this folder's parent on the path.
docs/how-to/test-cuda-without-a-gpu.md says what that shows, and what it cannot show.
"""
