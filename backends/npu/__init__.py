"""The Ascend NPU, through torch_npu: driver, kernels and graphs; and an emulated CANN to run them on any machine.

driver.py opens the backend, probe.py says whether it can, soc.py knows what each generation takes. kernels.py and
attention.py map operations to torch_npu's, fractal.py is the cache in FRACTAL_NZ, graph.py captures and replays,
failures.py reads CANN's error codes. emulator/ is the emulated CANN; autoload.py lets a variable bring it in.

The package itself imports nothing: the emulator has to be in place before torch is imported, and torch itself imports
autoload.py half-way through its own import.
"""
