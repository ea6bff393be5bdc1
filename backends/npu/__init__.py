"""The Ascend NPU, through torch_npu: driver, kernels and graphs; and an emulated CANN to run them on any machine.

driver.py chooses the device and opens backend.py. probe.py says whether it can, options.py declares its options, and
soc.py describes each hardware generation. kernels/ maps operations to torch_npu's. graph.py captures and replays;
capture_watch.py and lengths.py serve its host values. npugraph_ex/ is the compiler of that name. failures.py reads
CANN's error codes. emulator/ is the emulated CANN, and autoload.py loads it for a program that sets a variable.

The package itself imports nothing: the emulator has to be in place before torch is imported, and torch itself imports
autoload.py half-way through its own import.
"""
