"""Driver, kernels and graphs for the Ascend NPU, on torch_npu; and an emulated CANN that runs them on any machine.

driver.py chooses the device and opens backend.py. probe.py says whether it can, options.py declares its options, and
soc.py describes each hardware generation. kernels/ maps operations to torch_npu's. graph.py captures and replays;
lengths.py serves its host values. npugraph_ex/ is the compiler of that name. failures.py reads CANN's error codes.
emulator/ is the emulated CANN, and autoload.py loads it for a program that sets a variable.

This file imports nothing: the emulator must be active before torch is imported, and torch imports autoload.py during
its own import.
"""
