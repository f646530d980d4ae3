"""Lets the stock SGLang server run where torch has no CUDA device, and many of them on few cores: only device calls are
patched, how long a scheduler that has nothing to do looks away, and that processes come by fork.

Python imports this module at start from PYTHONPATH; it acts only with SGLANG_USE_CPU_ENGINE=1.
"""

import asyncio
import multiprocessing
import os
import time

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    # OpenMP's threads wait in a loop: engines that share cores would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    import zmq

    receive = zmq.Socket.recv

    def receive_or_look_away(self, *args, **kwargs):
        """A scheduler that is paused, or of a pair, asks its sockets without a pause: it takes the core of another."""
        try:
            return receive(self, *args, **kwargs)
        except zmq.Again:
            try:
                asyncio.get_running_loop()
            except RuntimeError:  # no server's loop, which waits by itself
                time.sleep(0.0001)
            raise

    zmq.Socket.recv = receive_or_look_away

    set_start_method = multiprocessing.set_start_method

    def fork_in_place_of_spawn(method, force=False):
        """SGLang spawns for CUDA's sake, and each process imports all again: 31 s of CPU an engine's start, not 13."""
        set_start_method("fork" if method == "spawn" else method, force=force)

    multiprocessing.set_start_method = fork_in_place_of_spawn

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

# Models that see images need more: their code names kernels of builds for the CPU without calling them here.
if os.environ.get("SGLANG_CPU_ENGINE_IMAGES") == "1":
    import enum

    import torch._ops

    find_operator = torch._ops._OpNamespace.__getattr__

    def find_or_refuse(namespace, name):
        try:
            return find_operator(namespace, name)
        except AttributeError:
            if namespace.name != "sgl_kernel" or "cpu" not in name:
                raise

            def missing(*args, **kwargs):
                raise NotImplementedError(f"sgl_kernel.{name}")

            return missing

    def pickled_by_value(member, protocol):
        """As newer Pythons do; that of Debian 12 pickles a call of getattr, which SGLang refuses to load."""
        return member.__class__, (member._value_,)

    torch._ops._OpNamespace.__getattr__ = find_or_refuse
    enum.Enum.__reduce_ex__ = pickled_by_value
