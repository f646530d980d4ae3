"""Stands in for the compiled package sgl_kernel, which has no build for a CPU without AMX.

Importing a kernel works; calling one fails loudly.
"""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}")

    kernel.__name__ = name
    return kernel
