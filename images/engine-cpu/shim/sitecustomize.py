"""Lets the stock SGLang server run where torch has no CUDA device: only device calls are patched.

Python imports this module at start from PYTHONPATH; it acts only with SGLANG_USE_CPU_ENGINE=1.
"""

import os

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    import torch

    class CudaRuntime:
        """Pinning memory succeeds and does nothing, as does every other call."""

        def cudaHostRegister(self, *args):
            return 0

        def cudaHostUnregister(self, *args):
            return 0

        def __getattr__(self, name):
            return lambda *args: 0

    class Event:
        """A CUDA event that has always happened."""

        def __init__(self, *args, **kwargs):
            pass

        def record(self, *args, **kwargs):
            pass

        def synchronize(self):
            pass

        def wait(self, *args):
            pass

        def query(self):
            return True

        def elapsed_time(self, other):
            return 0.0

    real_empty = torch.empty

    def empty_unpinned(*args, pin_memory=False, **kwargs):
        return real_empty(*args, **kwargs)

    torch.get_device_module = lambda device=None: torch.cpu
    torch.cuda.cudart = lambda: CudaRuntime()
    torch.cuda.Event = Event
    torch.cuda.current_stream = torch.cpu.current_stream
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.empty = empty_unpinned
