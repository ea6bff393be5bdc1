"""Driver, kernels and graphs for the Ascend NPU, on torch_npu; and an emulated CANN that runs them on any machine.

driver.py chooses the device and opens backend.py. probe.py says whether it can, options.py declares its options, and
soc.py describes each hardware generation. kernels/ maps operations to torch_npu's. graph.py captures and replays;
lengths.py serves its host values. npugraph_ex/ is the compiler of that name. failures.py reads CANN's error codes.
emulation.py activates the emulated CANN, a distribution of its own, command.py is ``hal emulate``, and autoload.py
activates it for a program that sets a variable. installed_cann.py looks for a real one.

This file imports nothing: the emulated CANN must be active before torch is imported, and torch imports autoload.py
during its own import.
"""
