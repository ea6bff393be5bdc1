"""Drivers, backends and compilers: the interfaces that a vendor implements, and their selection by a configuration."""
