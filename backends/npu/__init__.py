"""The Ascend NPU: what hal knows of torch_npu and CANN.

emulator/ is an emulated CANN, under which the unmodified torch_npu runs on a CPU; autoload.py lets a variable put it
there. The driver is planned, and not here yet.
"""
