"""The first day on hardware: checks, texts and figures of a device, each in a process of its own, and their report."""
